"""The address of Valkey or Redis servers: what the URL says, with the files that it names."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lwkv.storage.remote.remote_url import RemoteURL, parse_remote_url

DEFAULT_PORT = 6379
OPTIONS = ("cluster", "timeout_s", "connect_timeout_s", "ca", "cert", "key")
_TLS = ("valkeys", "rediss")


@dataclass(frozen=True)
class ValkeyAddress:
    """What is needed to connect. Files are read and checked when it is made, see `read_address`."""

    url: RemoteURL
    cluster: bool
    timeout_s: float
    connect_timeout_s: float
    database: int | None
    authorities: bytes | None = field(repr=False)
    identity: tuple[bytes, bytes] | None = field(repr=False)

    @property
    def is_encrypted(self) -> bool:
        return self.url.scheme in _TLS


def read_address(text: str) -> ValkeyAddress:
    """Read a URL with a scheme of valkey, valkeys, redis or rediss. Raises ConfigError."""
    url = parse_remote_url(text, DEFAULT_PORT, OPTIONS)
    if url.path and not url.path.isdecimal():
        raise url.refuse("what follows the / is no number of a database")
    if ("cert" in url.options) != ("key" in url.options):
        raise url.refuse("cert and key go together")
    if url.scheme not in _TLS and {"ca", "cert", "key"} & set(url.options):
        raise url.refuse("ca, cert and key are for TLS: write valkeys:// or rediss://")
    identity = (_read(url, "cert"), _read(url, "key"))
    return ValkeyAddress(
        url,
        cluster=url.flag("cluster", len(url.hosts) > 1),
        timeout_s=url.seconds("timeout_s", 2.0),
        connect_timeout_s=url.seconds("connect_timeout_s", 1.0),
        database=int(url.path) if url.path else None,
        authorities=_read(url, "ca"),
        identity=None if identity[0] is None or identity[1] is None else (identity[0], identity[1]),
    )


def _read(url: RemoteURL, option: str) -> bytes | None:
    if option not in url.options:
        return None
    try:
        return Path(url.options[option]).read_bytes()
    except OSError as error:
        raise url.refuse(f"{option} cannot be read: {error}") from None
