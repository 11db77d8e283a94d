"""vLLM's steps by number, and how far the workers have reported them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Steps:
    """Which step is under way, and what is known of those before it.

    Attributes:
        current: number of the last step that was ordered.
        acknowledged: number of the last step that the workers have reported.
        last_load: number of the last step that loads.
    """

    current: int = 0
    acknowledged: int = 0
    last_load: int = 0

    @property
    def awaits_load(self) -> bool:
        """Whether a load was ordered that has not been reported yet, and may have failed."""
        return self.last_load > self.acknowledged
