"""The address of a remote tier: a URL with one host or several, and options after a question mark."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import parse_qsl, unquote

from lwkv.config.addresses import WrongAddressError, split_hosts, take_apart
from lwkv.config.messages import shown
from lwkv.config.secrets import HIDDEN, cut
from lwkv.config.values import read_flag
from lwkv.errors import ConfigError

USER = "LWKV_REMOTE_USER"
PASSWORD = "LWKV_REMOTE_PASSWORD"
T = TypeVar("T")
_OPTION = re.compile("[a-z_]{1,20}")


@dataclass(frozen=True)
class RemoteURL:
    """A remote tier's address, taken apart. User and password are in no text made of it."""

    scheme: str
    hosts: tuple[tuple[str, int], ...]
    path: str
    options: Mapping[str, str]
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """Where it leads, without who asks and how."""
        return f"{self.scheme}://{','.join(f'{_bracketed(host)}:{port}' for host, port in self.hosts)}"

    def flag(self, name: str, default: bool) -> bool:
        """Read an option that is true or false. Raises ConfigError."""
        return default if name not in self.options else self._read(name, read_flag, "true or false")

    def seconds(self, name: str, default: float) -> float:
        """Read an option in seconds, above 0. Raises ConfigError."""
        return default if name not in self.options else self._read(name, _positive, "a number above 0")

    def gib(self, name: str, default: float) -> int:
        """Read an option in GiB, 0 or more, and give it in bytes. Raises ConfigError."""
        size = default if name not in self.options else self._read(name, _not_negative, "0 or more")
        return int(size * 2**30)

    def _read(self, name: str, read: Callable[[str], T], allowed: str) -> T:
        try:
            return read(self.options[name])
        except ValueError:
            raise self.refuse(f"{name} is {shown(self.options[name])}; allowed: {allowed}") from None

    def refuse(self, problem: str) -> ConfigError:
        """Make the error for a `problem` with this address."""
        return ConfigError(f"remote_url {self}: {problem}")


def parse_remote_url(url: str, default_port: int, options: tuple[str, ...]) -> RemoteURL:
    """Take `scheme://[user[:password]@]host[:port][,...][/path][?option=value&...]` apart.

    User and password are percent-decoded; where the URL has none they come from the environment.

    Args:
        options: the names of those that there are.

    Raises:
        ConfigError: no host, a port that is none, an option that there is not or that is given twice.
    """
    try:
        parts = take_apart(url)
    except WrongAddressError as error:
        raise ConfigError(f"remote_url: {error}") from None
    try:
        hosts = split_hosts(parts.hosts, default_port)
    except WrongAddressError as error:
        raise ConfigError(f"remote_url {cut(f'{parts.scheme}://{parts.hosts}')}: {error}") from None
    given = parse_qsl(parts.query, keep_blank_values=True)
    found = RemoteURL(parts.scheme.lower(), hosts, parts.path, dict(given), *_credentials(parts.login))
    _check_options(found, [name for name, _ in given], options)
    return found


def _check_options(url: RemoteURL, given: list[str], known: tuple[str, ...]) -> None:
    allowed = f"allowed: {', '.join(known)}"
    for name in given:
        if name not in known:
            # What does not look like the name of an option may be the rest of a password.
            option = repr(name) if _OPTION.fullmatch(name) else HIDDEN
            raise url.refuse(f"there is no option {option}; {allowed}")
        if given.count(name) > 1:
            raise url.refuse(f"option {name!r} is given twice")


def _credentials(login: str) -> tuple[str | None, str | None]:
    name, colon, word = login.partition(":")
    user = unquote(name) if name else os.environ.get(USER)
    password = unquote(word) if colon else os.environ.get(PASSWORD)
    return user or None, password or None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number <= 86400:
        raise ValueError(text)
    return number


def _not_negative(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 2**20:
        raise ValueError(text)
    return number
