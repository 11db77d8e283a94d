"""Environment variables of LMCache, which lwkv does not read."""

from __future__ import annotations

import logging
import os
from functools import cache

log = logging.getLogger(__name__)

PREFIX = "LMCACHE_"


def foreign_variables() -> str | None:
    """One line that names the variables of LMCache that are set; None where none is. Values are not shown."""
    names = sorted(name for name in os.environ if name.startswith(PREFIX))
    if not names:
        return None
    verb = "is" if len(names) == 1 else "are"
    return f"{', '.join(names)} {verb} ignored: lwkv reads variables that begin with LWKV_"


def warn_of_foreign_variables() -> None:
    """Log that line, once in a process however many engines it has."""
    if (line := foreign_variables()) is not None:
        _warn(line)


@cache
def _warn(line: str) -> None:
    log.warning("%s", line)
