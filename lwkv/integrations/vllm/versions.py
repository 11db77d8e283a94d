"""Which vLLM this works with."""

from __future__ import annotations

import logging
import re

from lwkv.errors import ConfigError

log = logging.getLogger(__name__)

OLDEST = (0, 20)
NEWEST = (0, 32)


def check_version(version: str) -> None:
    """Refuse a vLLM that is too old, and warn of one that is newer than what was tested.

    Raises:
        ConfigError: with the versions that work.
    """
    found = release_of(version)
    if found is None:
        log.warning("vLLM calls itself %s; lwkv was tested with %s", version, _range())
        return
    if found < OLDEST:
        raise ConfigError(f"vLLM {version} lacks hooks that lwkv needs: install vLLM {_range()}")
    if found > NEWEST:
        log.warning("vLLM %s is newer than what lwkv was tested with, %s", version, _range())


def release_of(version: str) -> tuple[int, int] | None:
    """The first two numbers of a version; None where it is that of a checkout without any."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return None if match is None or version.startswith("0.1.dev") else (int(match[1]), int(match[2]))


def _range() -> str:
    return f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
