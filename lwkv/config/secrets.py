"""Passwords are cut out of what a user is shown: here and nowhere else, and before anything is shortened.

A value may be under any key, misspelt ones included, and need not be the URL that it was meant to be. So text
is shown where it cannot have a login in it; of any other only what surely is a scheme or a host.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher

HIDDEN = "***"
_SECRET = re.compile(
    "pas|pw|secret|token|user|credential|auth|login|(api|access|private)_?key", re.IGNORECASE
)
# Settings that count tokens of text.
_COUNT = re.compile(
    "(min|max|num)_tokens?|(min|max|num)_[a-z]+_tokens|tokens?_(threshold|count|size|limit)", re.IGNORECASE
)
_ADDRESS = re.compile("url|uri|addr|host(?!_memory)|server|remote|endpoint", re.IGNORECASE)
_SCHEME = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*://")
_PORT = "(:([0-9]{1,4}|[1-5][0-9]{4}|6[0-5][0-9]{3}))?"
_HOST = rf"([\w.-]*|\[[0-9A-Fa-f:.]+\]){_PORT}"
_HOSTS = re.compile(f"{_HOST}(,{_HOST})*", re.ASCII)
# user:password, also as a URL has it, and what YAML reads as a tag, an anchor or an alias.
_DOUBTFUL = re.compile(r":|%3a|%40|^[\s\[{]*[!&*%]", re.IGNORECASE)
_NUMBERS = re.compile(r"\s*\{(\s*\w+\s*:\s*([0-9.eE+-]+|true|false|null)\s*(,|(?=\})))*\s*\}\s*")
_LIKE = 0.7
_MOST_LEVELS = 5  # what is deeper is not shown


def cut(text: str) -> str:
    """Text without any part that may be a user, a password or an option of a URL."""
    if "@" in text:
        return f"{_scheme(text)}{HIDDEN}@{re.split('[/?#]', text.rpartition('@')[2])[0]}"
    if "://" in text:
        return _without_path(text)
    return HIDDEN if _DOUBTFUL.search(text) and not _NUMBERS.fullmatch(text) else text


def cut_inside(value: object) -> object:
    """The same value if no text and no name in it may be a secret's, else nothing of it; a text is cut.

    All of it: a list may be a text that was split within a password, and a name with "://" in it is a URL
    that YAML has split behind the user.
    """
    if isinstance(value, str):
        return cut(value)
    is_hidden = any(cut(text) != text for text in _texts_in(value))
    is_hidden = is_hidden or any(is_secret(name) or "://" in name for name in _names_in(value))
    return HIDDEN if is_hidden else value


def cut_under(name: str, value: object) -> object:
    """A value as it may be shown under `name`: a secret's name hides it, here or inside, and what should be
    an address is shown only as far as it is one."""
    if value is None or value == "" or isinstance(value, bool):
        return value
    if is_secret(name) or any(is_secret(text) for text in _texts_in(value)):
        return HIDDEN
    if not is_address(name):
        return cut_inside(value)
    return cut(value) if isinstance(value, str) and re.search("@|://", value) else HIDDEN


def is_secret(text: str) -> bool:
    """Whether a text speaks of passwords and the like."""
    return _SECRET.search(_COUNT.sub("", text)) is not None


def is_address(name: str) -> bool:
    """Whether a name, maybe misspelt, is one of an address."""
    like = SequenceMatcher(None, "remote_url", name.lower().removeprefix("lwkv_")).ratio()
    return like >= _LIKE or _ADDRESS.search(name) is not None


def _names_in(value: object, levels: int = _MOST_LEVELS) -> Iterator[str]:
    if levels and isinstance(value, Mapping):
        yield from (name for name in value if isinstance(name, str))
        for item in value.values():
            yield from _names_in(item, levels - 1)
    elif levels and isinstance(value, (list, tuple)):
        for item in value:
            yield from _names_in(item, levels - 1)


def _texts_in(value: object, levels: int = _MOST_LEVELS) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif levels and isinstance(value, (Mapping, list, tuple)):
        items = [*value, *value.values()] if isinstance(value, Mapping) else value
        for item in items:
            yield from _texts_in(item, levels - 1)


def _scheme(text: str) -> str:
    found = _SCHEME.match(text)
    return found[0] if found else ""


def _without_path(text: str) -> str:
    scheme = _scheme(text)
    if not scheme:
        return HIDDEN
    rest = text[len(scheme) :]
    if scheme.strip().lower() == "file://":
        return text if ":" not in rest else f"{scheme}{HIDDEN}"
    hosts, *path = re.split("[/?#]", rest, maxsplit=1)
    if not _HOSTS.fullmatch(hosts):
        return f"{scheme}{HIDDEN}"
    return f"{scheme}{hosts}" + (f"/{HIDDEN}" if path and path[0] else "")
