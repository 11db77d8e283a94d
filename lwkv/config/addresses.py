"""Where servers are: the part of a URL that holds hosts and ports."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

SCHEMES_WITH_HOSTS = ("valkey", "valkeys", "redis", "rediss", "mooncake")
"""Of the tiers that are built in. A tier of another package may have addresses of any form."""


class WrongAddressError(ValueError):
    """Its text says what is wrong with an address, and shows nothing of it that may be a secret."""


class Parts(NamedTuple):
    """`scheme://[login@]hosts[/path][?query]`, as text."""

    scheme: str
    login: str
    hosts: str
    path: str
    query: str


def take_apart(url: str) -> Parts:
    """Split a URL. Raises WrongAddressError: nobody can say where its password ends."""
    scheme, _, rest = url.partition("://")
    rest, _, query = rest.partition("?")
    authority, _, path = rest.partition("/")
    if "@" in path or "@" in query:
        # What looks like the host may be half of a password.
        raise WrongAddressError("in user and password write % and two digits for each of / ? @ :")
    login, _, hosts = authority.rpartition("@")
    return Parts(scheme, login, hosts, path, query)


def check_hosts(url: str) -> None:
    """Raise WrongAddressError for hosts or ports that cannot be any, if it is known that `url` has some."""
    if url.partition("://")[0].lower() in SCHEMES_WITH_HOSTS:
        split_hosts(take_apart(url).hosts, 1)


def split_hosts(hosts: str, default_port: int) -> tuple[tuple[str, int], ...]:
    """The hosts, each with its port. Raises WrongAddressError."""
    return tuple(_split(host, default_port) for host in hosts.split(","))


def _split(text: str, default_port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
    except ValueError:
        raise WrongAddressError("an IPv6 address is written in brackets, as [::1]:6379") from None
    if not parts.hostname or parts.path or parts.fragment:
        raise WrongAddressError("no host is where a host should be")
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise WrongAddressError("what follows the last colon is no port, a number from 1 to 65535")
    return parts.hostname, default_port if port is None else port
