"""The share that each batch computes again, and the times of the batches before."""

from __future__ import annotations

from collections import deque

import torch

from lwkv.blend.forward.forward_pass import LayerHook
from lwkv.blend.share.controller import BatchWork, Decision, LoadingController, Reason
from lwkv.blend.share.pace import Pace
from lwkv.platforms import Platform
from lwkv.telemetry.counters import Counters

_MOST_PENDING = 8


class Shares:
    """Asks a controller, or gives the same share always; counts decisions as `blend_decisions_<reason>`.

    Args:
        share: the fixed share, or the least one of `controller`.
        controller: None for a fixed share.
    """

    def __init__(
        self,
        share: float,
        controller: LoadingController | None,
        platform: Platform,
        device: torch.device,
        counters: Counters,
    ) -> None:
        self.controller = controller
        self.last = Decision(share, Reason.FIXED)
        self._platform, self._device, self._counters = platform, device, counters
        self._pending: deque[tuple[BatchWork, int, Pace]] = deque(maxlen=_MOST_PENDING)

    def choose(self, work: BatchWork) -> Decision:
        """Decide for a batch that has something to reuse."""
        if self.controller is not None:
            self._learn(self.controller)
            self.last = self.controller.decide(work)
        self._counters.add(f"blend_decisions_{self.last.reason.value}")
        return self.last

    def new_pace(self) -> Pace:
        """What takes the time of one pass."""
        return Pace(self._platform, self._device)

    def note(self, work: BatchWork, row_layers: int, pace: Pace) -> None:
        """Remember a pass that has ended and loaded all, to learn of it once the device is through."""
        if self.controller is not None:
            self._pending.append((work, row_layers, pace))

    def _learn(self, controller: LoadingController) -> None:
        while self._pending:
            work, row_layers, pace = self._pending[0]
            found = pace.found()
            if found is None:
                return
            controller.learn(work, row_layers, found)
            self._pending.popleft()


def timed(wait: LayerHook, pace: Pace) -> LayerHook:
    """`wait`, with its beginning and its end noted."""

    def timed_wait(layer: int) -> None:
        pace.arrive()
        wait(layer)
        pace.go_on()

    return timed_wait
