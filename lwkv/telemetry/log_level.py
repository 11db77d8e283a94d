"""How much lwkv logs."""

from __future__ import annotations

import logging
import os

from lwkv.errors import ConfigError

VARIABLE = "LWKV_LOG_LEVEL"
LEVELS = ("debug", "info", "warning", "error", "critical")


def follow_log_level() -> None:
    """Give the logger `lwkv` the level that LWKV_LOG_LEVEL names; where it is not set, change nothing.

    Lines that no handler would show then go to stderr.

    Raises:
        ConfigError: the variable names no level.
    """
    name = os.environ.get(VARIABLE)
    if name is None:
        return
    if name.lower() not in LEVELS:
        raise ConfigError(f"environment variable {VARIABLE}: got {name!r}; allowed: {', '.join(LEVELS)}")
    logger = logging.getLogger("lwkv")
    logger.setLevel(name.upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
