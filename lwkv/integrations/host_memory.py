"""Host memory that is ready before an engine takes requests."""

from __future__ import annotations

import logging
from typing import Protocol

log = logging.getLogger(__name__)

MEMORY_S = 60.0
"""How long an engine's start waits for host memory: about 4 GiB a second are page-locked meanwhile."""


class WithMemory(Protocol):
    """An engine; see CacheEngine."""

    def wait_for_memory(self, timeout_s: float) -> bool: ...


def wait_for_memory(engine: WithMemory) -> None:
    """Wait until host memory is page-locked: what the model launches meanwhile is slower.

    Call it when the device's graphs are captured, and before requests are taken.
    """
    if not engine.wait_for_memory(MEMORY_S):
        log.warning(
            "host memory is not yet page-locked after %.0f s: requests are taken, the rest follows in "
            "the background, and what finds no page until then is not stored",
            MEMORY_S,
        )
