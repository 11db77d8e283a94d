"""Loads for requests that are in no step until they are received."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lwkv.hybrid import HybridEngine, Load
from lwkv.hybrid.loads_apart import LoadsApart
from lwkv.integrations.vllm.hybrid.orders import LoadOrder
from lwkv.telemetry.counters import Counters
from lwkv.telemetry.log_throttle import LogThrottle

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class StepLoads:
    """The loads of one step, and when they were queued."""

    request_ids: list[str]
    apart: LoadsApart
    since: float


class LoadsUnderWay:
    """Queues loads, and asks in each step whether the device is past them. For one thread.

    No step waits for them: neither the host, nor the stream that computes other requests. A request is
    received when its load has arrived, also one that was aborted or whose load has failed: until then vLLM
    keeps its blocks, which are still written to.

    Args:
        timeout_s: after so long the model's stream is made to wait, once, and the requests are received: what
            is queued cannot be taken back, and no request is to be kept for ever.
        clock: seconds.
    """

    def __init__(
        self,
        engine: HybridEngine,
        timeout_s: float,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._counters = counters
        self._clock = clock
        self._steps: list[StepLoads] = []
        self._throttle = LogThrottle(log, clock)

    def __len__(self) -> int:
        """Steps whose loads are under way."""
        return len(self._steps)

    def begin(self, orders: Sequence[LoadOrder]) -> None:
        """Queue what a step is to load, behind what the current stream holds."""
        if orders:
            apart = self._engine.load_apart([load_of(order) for order in orders])
            self._steps.append(StepLoads([order.request_id for order in orders], apart, self._clock()))

    def take_received(self) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended since the last call, and those of them whose loads have failed.

        What the current stream does from now on finds what was loaded.
        """
        received, failed, still = set[str](), set[str](), []
        for loads in self._steps:
            if not (loads.apart.have_arrived() or self._is_overdue(loads)):
                still.append(loads)
                continue
            loads.apart.wait()
            received.update(loads.request_ids)
            pairs = zip(loads.request_ids, loads.apart.loaded, strict=True)
            failed.update(request_id for request_id, is_there in pairs if not is_there)
        if failed:
            self._counters.add("loads_failed", len(failed))
        self._steps = still
        return received, failed

    def _is_overdue(self, loads: StepLoads) -> bool:
        if self._clock() - loads.since < self._timeout_s:
            return False
        self._counters.add("loads_overdue", len(loads.request_ids))
        self._throttle.warn(
            "loads for %d requests take longer than load_timeout_s, %g s: the next step waits for them",
            len(loads.request_ids),
            self._timeout_s,
        )
        return True


def load_of(order: LoadOrder) -> Load:
    """What an order asks of the engine."""
    return Load(order.hashes.apart(), order.local, order.boundary, order.tables)
