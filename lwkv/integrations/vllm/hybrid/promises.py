"""Chunks that every rank pins before vLLM gets the answer that they will be loaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from lwkv.integrations.vllm.hybrid.orders import Hashes, PinOrder
from lwkv.integrations.vllm.hybrid.reports import HybridReport
from lwkv.telemetry.counters import Counters
from lwkv.telemetry.log_throttle import LogThrottle

log = logging.getLogger(__name__)

MOST_AT_A_TIME = 8
"""Requests whose chunks are pinned, or are being pinned, at a time: what is pinned makes no room."""


@dataclass(slots=True, eq=False)
class Promise:
    """What one request waits for, or may be promised.

    Attributes:
        order: to the workers.
        since: when it was asked for.
        answers: by rank, whether it has pinned all.
    """

    order: PinOrder
    since: float
    answers: dict[int, bool] = field(default_factory=dict)
    is_given_up: bool = False

    def is_over(self, num_ranks: int) -> bool:
        """Whether no answer is awaited any more."""
        return self.is_given_up or len(self.answers) >= num_ranks

    def is_whole(self, num_ranks: int) -> bool:
        """Whether all ranks have pinned all."""
        return not self.is_given_up and len(self.answers) >= num_ranks and all(self.answers.values())


class Promises:
    """Has the workers pin what requests are to load, one order a request, and keeps what they answer.

    vLLM cannot compute again what a load has not brought where a model has several groups of caches. So
    nothing is promised that is not pinned in the host memory of every rank.

    Args:
        timeout_s: how long a request waits for answers; what is pinned is released after twice that.
        clock: seconds.
    """

    def __init__(
        self,
        num_ranks: int,
        timeout_s: float,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._counters = counters
        self._clock = clock
        self._promises: dict[str, Promise] = {}
        self._to_pin: list[PinOrder] = []
        self._to_release: list[int] = []
        self._last_number = 0
        self._throttle = LogThrottle(log, clock)

    def begin(self, request_id: str, hashes: Sequence[bytes], local: int, boundary: int) -> None:
        """Have chunks pinned with which a request can go on at `boundary`; later, if too many are by now."""
        if self.is_full:
            return
        self._last_number += 1
        order = PinOrder(self._last_number, Hashes.of(hashes), local, boundary)
        self._promises[request_id] = Promise(order, self._clock())
        self._to_pin.append(order)
        self._counters.add("requests_waited")

    def find(self, request_id: str) -> Promise | None:
        """What a request waits for, or has."""
        return self._promises.get(request_id)

    def waits(self, promise: Promise) -> bool:
        """Whether answers are still awaited; not for longer than the timeout."""
        if not promise.is_over(self._num_ranks) and self._clock() - promise.since >= self._timeout_s:
            promise.is_given_up = True
            self._counters.add("prefetches_given_up")
            self._throttle.warn(
                "not all ranks have answered within %g s whether chunks are pinned: they are looked up again",
                self._timeout_s,
            )
        return not promise.is_over(self._num_ranks)

    def covers(self, promise: Promise, local: int) -> bool:
        """Whether a request with `local` tokens in vLLM's own cache can be loaded with what is pinned."""
        return promise.is_whole(self._num_ranks) and promise.order.local <= local

    def leave(self, request_id: str) -> None:
        """Release what is pinned for a request, if anything is."""
        promise = self._promises.pop(request_id, None)
        if promise is None:
            return
        if promise.order in self._to_pin:  # no worker has heard of it
            self._to_pin.remove(promise.order)
        else:
            self._to_release.append(promise.order.number)

    def learn(self, report: HybridReport) -> None:
        """Take over what a rank has pinned."""
        for promise in self._promises.values():
            is_pinned = report.pinned.get(promise.order.number)
            if is_pinned is not None:
                promise.answers[report.info.rank] = is_pinned

    def clear(self) -> None:
        """Release everything."""
        for request_id in list(self._promises):
            self.leave(request_id)

    @property
    def is_full(self) -> bool:
        """Whether no more can begin."""
        return len(self._promises) >= MOST_AT_A_TIME

    def orders(self, loading: Container[str] = ()) -> tuple[list[PinOrder], list[int]]:
        """What is to be pinned, and the numbers of what is to be released, since the last call.

        Args:
            loading: requests whose promises do not time out: they are kept in this step.
        """
        now = self._clock()
        for request_id, promise in list(self._promises.items()):
            if request_id not in loading and now - promise.since >= 2 * self._timeout_s:
                self.leave(request_id)
        pins, self._to_pin = self._to_pin, []
        released, self._to_release = self._to_release, []
        return pins, released
