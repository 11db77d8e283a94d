"""One connection to a Valkey or Redis server, or to a cluster of them, through the official client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from lwkv.errors import ConfigError
from lwkv.storage.remote.client_probe import version_of, what_is_missing
from lwkv.storage.remote.remote_url import RemoteURL
from lwkv.storage.remote.valkey.address import ValkeyAddress
from lwkv.storage.remote.valkey.diagnosis import NOT_ALLOWED, WRONG_LOGIN, find_fault
from lwkv.storage.remote.valkey.shards import Shard

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
_NOT_ALLOWED = ("NOPERM", "PermissionDenied")
_NO_ENDS = (
    *_NOT_ALLOWED,
    *("no permissions", "wrong number of arguments", "Unsupported option", "syntax error", "unknown command"),
)
"""What a server says that will never set ends; other refusals pass, as READONLY in a failover does."""


class RefusedError(RuntimeError):
    """The server is there and answers a command with an error."""


class WrongTypeError(RefusedError):
    """Under this key there is something else than a hash."""


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
    if any(word in reason for word in _NOT_ALLOWED):
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


class ValkeyClient:
    """A connection, for one thread at a time. It connects again by itself.

    Every method raises ConnectionError where the server does not answer in time or is gone, RefusedError
    where it answers with an error.
    """

    def __init__(self, client: Any, glide: Any) -> None:
        self._client = client
        self._glide = glide
        self._clustered = isinstance(client, glide.GlideClusterClient)
        # The client's own hmget takes no buffers, where its mget does: each page would be copied once more.
        self._hmget = partial(client._execute_command, glide.sync_commands.core.RequestType.HMGet)
        self.usable = True

    def get(self, key: str, fields: Sequence[str], buffers: Sequence[memoryview]) -> list[int | None]:
        """Read fields of a hash, whole, each into its buffer; the length of each, None where there is none.

        A field that is too long for its buffer is refused.
        """
        with self._errors():
            found = self._hmget([key, *fields], response_buffers=list(buffers))
        return [None if length is None else int(length) for length in found]

    def set(self, key: str, fields: Mapping[str, memoryview | bytes], until_ms: int | None = None) -> bool:
        """Write fields of a hash, all at once; if it has no end yet it ends at `until_ms` since the epoch.

        False where the server refuses the end, and only that, whatever the key.
        """
        no_end = self._glide.ExpireOptions.HasNoExpiry
        commands: list[Callable[[Any], object]] = [lambda commands: commands.hset(key, fields)]
        if until_ms is not None:
            commands.append(lambda commands: commands.pexpireat(key, until_ms, no_end))
        with self._errors():
            written, *ends = self._run(commands)
            _checked(written)
            return _are_set(ends)

    def keep(self, keys: Sequence[str], until_ms: Sequence[int]) -> bool:
        """Have each key end then, in ms since the epoch, unless it ends later, and count as used just now.

        In this order. Keys may not be there; all have the same server. False where it refuses that for good.
        """
        later = self._glide.ExpireOptions.NewExpiryGreaterThanCurrent
        pairs = zip(keys, until_ms, strict=True)
        with self._errors():
            return _are_set(self._run([partial(_end_at, key, until, later) for key, until in pairs]))

    def lengths(self, key: str, fields: Sequence[str]) -> list[int]:
        """The length of each field in bytes; 0 where there is none."""
        return [int(self._one(partial(_ask_size, key, field))) for field in fields]

    def remove_fields(self, key: str, fields: Sequence[str]) -> None:
        """Remove fields that may be there."""
        self._one(lambda commands: commands.hdel(key, list(fields)))

    def remove(self, key: str) -> None:
        """Remove a key that may be there, whatever it has."""
        self._one(lambda commands: commands.unlink([key]))

    def count_fields(self, keys: Sequence[str]) -> list[int]:
        """Count the fields of each hash, in this order, and have it count as used just now.

        0 for something else than a hash. All keys have the same server.
        """
        results = self._run([partial(_ask_length, key) for key in keys])
        with self._errors():
            return [0 if _is_wrong_type(result) else int(_checked(result)) for result in results]

    def shards(self) -> list[Shard]:
        """Who serves which keys; one that has all of them where there is no cluster."""
        if not self._clustered:
            return [Shard(0, "the server")]
        with self._errors():
            rows = self._client.custom_command(["CLUSTER", "SLOTS"])
        return [Shard(first, f"{host.decode()}:{port}") for first, _, (host, port, *_), *_ in rows]

    def close(self) -> None:
        self.usable = False
        with self._errors():
            self._client.close()

    def _one(self, command: Callable[[Any], object]) -> Any:
        with self._errors():
            return _checked(self._run([command])[0])

    def _run(self, commands: Sequence[Callable[[Any], object]]) -> list[Any]:
        """Make calls of a client's commands; the result of each, which is an error where it was refused."""
        # In a cluster one by one: while a node is down, batches and commands of several slots time out even
        # where none of their keys is on that node. Where there is none, what a batch is refused raises
        # nothing; what a single command is refused the client also writes to the terminal.
        with self._errors():
            if self._clustered:
                return [self._alone(command) for command in commands]
            batch: Any = self._glide.Batch(is_atomic=False)
            for command in commands:
                command(batch)
            return self._client.exec(batch, raise_on_error=False) or []

    def _alone(self, command: Callable[[Any], object]) -> Any:
        glide = self._glide
        try:
            return command(self._client)
        except (glide.TimeoutError, glide.ConnectionError):
            raise
        except glide.RequestError as error:
            return error

    @contextmanager
    def _errors(self) -> Iterator[None]:
        glide = self._glide
        try:
            yield
        except glide.ClosingError as error:
            self.usable = False
            raise ConnectionError(f"the connection was closed: {error}") from None
        except (glide.TimeoutError, glide.ConnectionError) as error:
            raise ConnectionError(f"no answer: {error}") from None
        except glide.RequestError as error:
            kind = WrongTypeError if _is_wrong_type(error) else RefusedError
            raise kind(f"the server refuses: {error}") from None


def _ask_size(key: str, field: str, commands: Any) -> object:
    return commands.hstrlen(key, field)


def _end_at(key: str, until_ms: int, option: Any, commands: Any) -> object:
    return commands.pexpireat(key, until_ms, option)


def _are_set(ends: Sequence[Any]) -> bool:
    """False where the server sets no ends at all. Raises what it refuses for now only."""
    refused = [end for end in ends if isinstance(end, Exception)]
    for error in refused:
        if not any(words in str(error) for words in _NO_ENDS):
            raise error
    return not refused


def _ask_length(key: str, commands: Any) -> object:
    return commands.hlen(key)


def _is_wrong_type(result: object) -> bool:
    return isinstance(result, Exception) and "WRONGTYPE" in str(result)


def _checked(result: Any) -> Any:
    if isinstance(result, Exception):
        raise result
    return result
