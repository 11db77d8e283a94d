"""Connects to a Valkey or Redis server, or a cluster, and says what is wrong where that fails."""

from __future__ import annotations

from typing import Any

from lwkv.errors import ConfigError
from lwkv.storage.remote.client_probe import version_of, what_is_missing
from lwkv.storage.remote.remote_url import RemoteURL
from lwkv.storage.remote.valkey.address import ValkeyAddress
from lwkv.storage.remote.valkey.client import REFUSALS, ValkeyClient
from lwkv.storage.remote.valkey.diagnosis import NOT_ALLOWED, WRONG_LOGIN, find_fault

_CONFIGURATION = (
    *("use_tls", "credentials", "request_timeout", "reconnect_strategy", "database_id", "client_name"),
    "advanced_config",
)
_NEEDED = {
    **dict.fromkeys(
        ("GlideClient._execute_command", "GlideClusterClient._execute_command"), ("response_buffers",)
    ),
    **dict.fromkeys(("GlideClientConfiguration", "GlideClusterClientConfiguration"), _CONFIGURATION),
    **dict.fromkeys(
        ("AdvancedGlideClientConfiguration", "AdvancedGlideClusterClientConfiguration"), ("tls_config",)
    ),
    "TlsAdvancedConfiguration": ("root_pem_cacerts", "client_cert_pem", "client_key_pem"),
    "BackoffStrategy": ("num_of_retries", "factor", "exponent_base"),
    "Batch": ("is_atomic",),
    **dict.fromkeys(
        (
            *("NodeAddress", "ServerCredentials", "Logger.init", "LogLevel.OFF"),
            *("GlideError", "ClosingError", "ConnectionError", "RequestError", "TimeoutError"),
            *("sync_commands.core.RequestType.HMGet", "GlideClient.exec", "GlideClient.hset"),
            *("GlideClient.hlen", "GlideClient.hstrlen", "GlideClient.hdel", "GlideClient.unlink"),
            *("GlideClient.pexpireat", "ExpireOptions.HasNoExpiry"),
            "ExpireOptions.NewExpiryGreaterThanCurrent",
        ),
        (),
    ),
}
"""What is used of the client."""
_WRONG_LOGIN = ("WRONGPASS", "NOAUTH")


def connect(address: ValkeyAddress) -> ValkeyClient:
    """Connect, within the address's time.

    Raises:
        ConfigError: the client is not installed; user, password or database are wrong, or the user may not do
            what is needed. ConnectionError: the text says what is wrong, also with a certificate.
    """
    glide = _import_glide(address.url)
    made: list[Any] = []
    try:
        return ValkeyClient(_create(glide, address, made), glide)
    except glide.GlideError as error:
        # It keeps every client, and would connect each that is not closed once more in a child process.
        for client in made:
            client.close()
        reason = str(error).strip()
        raise _failure(address, reason) from None


def _failure(address: ValkeyAddress, reason: str) -> ConfigError | ConnectionError:
    """What to raise where the client could not connect; `reason` is what it says, mostly a timeout."""
    if any(word in reason for word in _WRONG_LOGIN):
        return address.url.refuse(WRONG_LOGIN)
    fault = find_fault(address)
    if fault is not None and fault.is_setting:
        return address.url.refuse(fault.text)
    if any(word in reason for word in REFUSALS):
        return address.url.refuse(NOT_ALLOWED)
    return ConnectionError(f"{address.url} cannot be reached: {reason if fault is None else fault.text}")


def _import_glide(url: RemoteURL) -> Any:
    try:
        import glide_sync
        import xxhash  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"remote_url {url} needs a client that is not there ({error}): "
            "pip install '.[valkey]' in lwkv's folder"
        ) from None
    if missing := what_is_missing(glide_sync, _NEEDED):
        raise url.refuse(
            f"valkey-glide-sync {version_of('valkey-glide-sync')} is installed, but 2.6 or later is needed: "
            f"it lacks {', '.join(missing)}; pip install '.[valkey]' in lwkv's folder"
        )
    # It would write to the terminal what is raised anyway; a program that has set its level keeps it.
    glide_sync.Logger.init(glide_sync.LogLevel.OFF)
    return glide_sync


def _create(glide: Any, address: ValkeyAddress, made: list[Any]) -> Any:
    """Connect; the client is in `made` even where it cannot."""
    url, identity = address.url, address.identity or (None, None)
    kinds = {
        False: (glide.GlideClient, glide.GlideClientConfiguration, glide.AdvancedGlideClientConfiguration),
        True: (
            *(glide.GlideClusterClient, glide.GlideClusterClientConfiguration),
            glide.AdvancedGlideClusterClientConfiguration,
        ),
    }
    client, configuration, advanced = kinds[address.cluster]
    tls = glide.TlsAdvancedConfiguration(
        root_pem_cacerts=address.authorities, client_cert_pem=identity[0], client_key_pem=identity[1]
    )
    return _noted(client, made).create(
        configuration(
            [glide.NodeAddress(host, port) for host, port in url.hosts],
            use_tls=address.is_encrypted,
            credentials=url.password and glide.ServerCredentials(url.password, url.user),
            request_timeout=int(1000 * address.timeout_s),
            # How often it tries to connect again, for as long as it lives: every 100 ms at first, then 800.
            reconnect_strategy=glide.BackoffStrategy(num_of_retries=3, factor=100, exponent_base=2),
            database_id=address.database,
            client_name="lwkv",
            advanced_config=advanced(int(1000 * address.connect_timeout_s), tls_config=tls),
        )
    )


def _noted(client: Any, made: list[Any]) -> Any:
    """The same class, whose instances are noted in `made`."""

    def note(self: Any, configuration: object) -> None:
        made.append(self)
        client.__init__(self, configuration)

    return type(client.__name__, (client,), {"__init__": note})
