"""What waiting requests get from tiers below host memory, in models with several groups of caches."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lwkv.integrations.vllm.hybrid.boundary_fetches import BoundaryFetches
from lwkv.integrations.vllm.hybrid.kind_places import KindPlaces, find_places
from lwkv.integrations.vllm.hybrid.orders import HybridOrders
from lwkv.integrations.vllm.hybrid.rank_tiers import RankTiers
from lwkv.integrations.vllm.hybrid.reports import HybridInfo, HybridReport
from lwkv.integrations.vllm.scheduler.lookup.costs import Costs
from lwkv.integrations.vllm.scheduler.lookup.index import Below
from lwkv.integrations.vllm.scheduler.lookup.look_ups import LookUps
from lwkv.integrations.vllm.scheduler.lookup.step_costs import StepCosts
from lwkv.integrations.vllm.scheduler.lookup.waiting_loads import WaitingLoads
from lwkv.kinds import Kind, KindIndex
from lwkv.telemetry.counters import Counters
from lwkv.telemetry.log_throttle import LogThrottle

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Asked:
    """How far a request is.

    Attributes:
        since: when it was asked about first.
        answer: where its chunks are; None where the tiers were not asked.
        is_decided: whether nothing more is brought for it but what it waits for already.
    """

    since: float
    answer: Future[KindPlaces] | None = None
    is_decided: bool = False


class LowerHits:
    """Has lower tiers bring to host memory what a request needs to go on at a boundary, while it waits.

    All kinds of it: each chunk of full attention, the windows and the states of that boundary. What a request
    is promised is pinned by all ranks after that, as if it had been in host memory before.

    A request is looked up once before it runs. It waits for the look-up, and for what comes, no longer than
    `Costs` says, or, where costs are not compared, for `timeout_s`.

    Args:
        kinds, chunk_size: of the model.
        index: what is in host memory.
        compares_costs: whether a request only waits for what comes sooner than it is computed.
        clock: seconds.
        open_below: opens a rank's tiers.
    """

    def __init__(
        self,
        kinds: Sequence[Kind],
        chunk_size: int,
        index: KindIndex,
        num_ranks: int,
        counters: Counters,
        timeout_s: float,
        open_below: Callable[[HybridInfo], Below],
        compares_costs: bool = True,
        layerwise: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kinds, self._size, self._index = kinds, chunk_size, index
        self._clock = clock
        self._counters, self._timeout_s = counters, timeout_s
        self._throttle = LogThrottle(log, clock)
        self._ranks = RankTiers(open_below)
        self._asked: dict[str, Asked] = {}
        self._look_ups = LookUps()
        self._costs = Costs(chunk_size, layerwise, clock) if compares_costs else None
        self._step_costs = StepCosts(self._costs, counters)
        self._waiting = WaitingLoads(num_ranks, timeout_s, counters, clock)
        self._fetches = BoundaryFetches(index, self._ranks, self._waiting, self._costs, clock)

    def introduce(self, info: HybridInfo) -> None:
        """Learn of a rank. Raises ConfigError where its tiers cannot be opened."""
        self._ranks.introduce(info)

    def waits(self, request: Any, hashes: Sequence[bytes], num_local: int) -> bool:
        """Whether a request has to wait: its chunks are looked up in lower tiers, or are being brought.

        Args:
            hashes: of its chunks. num_local: tokens that vLLM has itself.
        """
        request_id = request.request_id
        asked = self._asked.setdefault(request_id, Asked(self._clock()))
        if not asked.is_decided and not self._decide(request, asked, hashes, num_local):
            return True
        if self._waiting.waits(request_id, self._ranks.most_room):
            return True
        self._note_wait(request_id)
        return False

    def leave(self, request_id: str) -> None:
        """Give back what was brought for a request that has been loaded, or has ended."""
        self._asked.pop(request_id, None)
        self._waiting.leave(request_id)

    def added_to(self, orders: HybridOrders, output: Any, loading: Iterable[str]) -> HybridOrders:
        """A step's orders with what is to be fetched, and is not any more, since the last call.

        And whether the workers are to report its end: it is known then how long it took.

        Args:
            loading: requests that load in this step, or that vLLM has given blocks for their load: what has
                not come for them by now is computed.
        """
        fetches, given_back = self._waiting.orders()
        loads = bool(orders.loads or orders.loads_apart)
        return replace(
            orders,
            fetches=fetches,
            stopped=[number for name in loading for number in self._waiting.coming(name)],
            given_back=given_back,
            is_timed=self._step_costs.begin(orders.step, output, measures=not loads),
        )

    def learn(self, report: HybridReport) -> None:
        """Take over what a rank has read, and fetched."""
        found = report.of_lower_tiers()
        if report.unread is not None:
            self._ranks.leave_alone(report.info.rank, report.unread)
        self._waiting.learn(found)
        self._step_costs.learn(found)

    def result_came(self) -> None:
        """Note that all was learnt of a step."""
        self._step_costs.result_came()

    def new_gauges(self) -> dict[str, int]:
        """The speeds measured, where they have changed."""
        return self._step_costs.new_gauges()

    def clear(self) -> None:
        """Give everything back."""
        self._asked.clear()
        self._waiting.clear()

    def close(self) -> None:
        """Close the tiers."""
        self._look_ups.close()
        self._ranks.close()

    def _decide(self, request: Any, asked: Asked, hashes: Sequence[bytes], num_local: int) -> bool:
        """Have a boundary brought, or none; False while it is not known yet where the chunks are."""
        num_tokens = int(request.num_tokens)
        if asked.answer is None and self._needs_no_tier(hashes, num_tokens, num_local):
            asked.is_decided = True
            return True
        answer = asked.answer or self._look_up(hashes, num_tokens)
        asked.answer, asked.is_decided = answer, answer.done() or self._is_late(asked, num_tokens)
        if answer.done() and not answer.cancelled():
            failure = answer.exception()
            if failure is None:
                self._fetches.begin(request.request_id, answer.result(), num_tokens, num_local, asked.since)
            else:
                self._counters.add("look_ups_failed")
                self._throttle.warn("a look-up in lower tiers failed, and nothing is loaded: %r", failure)
        return asked.is_decided

    def _needs_no_tier(self, hashes: Sequence[bytes], num_tokens: int, num_local: int) -> bool:
        """Whether lower tiers cannot have more than host memory has, or nobody can be asked."""
        most = max(num_tokens - 1, 0) // self._size * self._size
        is_most = most <= max(num_local, self._index.boundary(hashes, num_tokens, num_local))
        return is_most or not self._index.is_complete

    def _look_up(self, hashes: Sequence[bytes], num_tokens: int) -> Future[KindPlaces]:
        """Find out where the chunks are, on another thread."""
        hashes = [*hashes[: max(num_tokens - 1, 0) // self._size]]  # the list may grow meanwhile
        ranks = self._ranks.places(self._index, hashes)
        return self._look_ups.begin(partial(find_places, self._kinds, self._size, hashes, ranks))

    def _is_late(self, asked: Asked, num_tokens: int) -> bool:
        """Whether a look-up is not waited for any more."""
        limit = self._timeout_s if self._costs is None else self._costs.look_up_s(num_tokens)
        return self._clock() - asked.since >= limit

    def _note_wait(self, request_id: str) -> None:
        """Note where a wait was cut short, and which tiers did not bring what was waited for."""
        wait = self._waiting.cut_short(request_id)
        if wait is not None and self._costs is not None:
            self._costs.came_late(wait.tiers_missing, wait.moved_at)
