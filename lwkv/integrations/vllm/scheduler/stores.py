"""What a step stores of its requests, and what is left of those that have ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lwkv.integrations.vllm.orders import Move
from lwkv.integrations.vllm.reports import RankReport
from lwkv.integrations.vllm.scheduler.lookup.index import ChunkIndex
from lwkv.integrations.vllm.scheduler.moves import Moves
from lwkv.integrations.vllm.scheduler.request_state import RequestState, TokenRange
from lwkv.integrations.vllm.scheduler.requests import Requests
from lwkv.integrations.vllm.scheduler.scheduled import ScheduledRequest
from lwkv.integrations.vllm.scheduler.steps import Steps
from lwkv.integrations.vllm.scheduler.store_policy import StorePolicy


class Stores:
    """Orders each chunk to be stored once, in the step that makes it whole.

    With several ranks nothing that was computed beside a load, or behind one that has not been reported yet,
    is stored before all ranks have reported: if one rank's load fails, the others compute on its garbage.
    """

    def __init__(
        self,
        index: ChunkIndex,
        moves: Moves,
        requests: Requests,
        policy: StorePolicy,
        steps: Steps,
        num_ranks: int,
    ) -> None:
        self._index = index
        self._moves = moves
        self._requests = requests
        self._policy = policy
        self._steps = steps
        self._num_ranks = num_ranks
        self._leaving: dict[str, tuple[RequestState, Sequence[int]] | None] = {}
        self._handled_before: dict[int, list[tuple[RequestState, int]]] = {}

    def of_step(self, scheduled: Sequence[ScheduledRequest]) -> list[Move]:
        """What a step stores."""
        if not self._policy.stores:
            return []
        before = [(item.tracked, item.tracked.handled) for item in scheduled]
        stores = [
            self._moves.order(item.tracked, item.blocks(), span)
            for item in scheduled
            for span in self._spans(item)
        ]
        if stores:
            self._handled_before[self._steps.current] = before
        return stores

    def keeps(self, tracked: RequestState, blocks: Sequence[int]) -> bool:
        """Whether `blocks`, of a request that has ended, must stay until a step has stored the rest of it.

        A chunk's key needs all of its token ids. Where vLLM schedules a step before it knows what the one
        before has sampled, the id that fills a chunk is known a step after it was computed.
        """
        if not self._policy.stores or not tracked.has_rest(self._rest_end(tracked, blocks)):
            return False
        self._leaving[tracked.request.request_id] = tracked, list(blocks)
        return True

    def take_rests(self) -> tuple[list[Move], tuple[str, ...]]:
        """What to store of requests that have ended, and the names of those whose blocks were kept."""
        ended, self._leaving = self._leaving, {}
        moves = [move for item in ended.values() if item is not None for move in self._rest(*item)]
        return moves, tuple(ended)

    def learn(self, report: RankReport) -> None:
        """Take over whether a step's stores were kept; chunks of those that were not are stored later."""
        for tracked, handled in () if report.stored else self._handled_before.get(report.step, ()):
            tracked.handled = min(tracked.handled, handled)
            self._requests.wake(tracked)

    def forget_reported(self) -> None:
        """Forget what was ordered in steps that all ranks have reported."""
        for step in [step for step in self._handled_before if step <= self._steps.acknowledged]:
            del self._handled_before[step]

    def clear(self) -> None:
        """Store nothing any more of requests that have ended; their blocks are given back all the same."""
        self._leaving = dict.fromkeys(self._leaving)

    def _spans(self, item: ScheduledRequest) -> list[TokenRange]:
        tracked = item.tracked
        if self._num_ranks > 1 and self._steps.awaits_load:
            tracked.trusted = min(tracked.trusted, item.computed)
        else:
            tracked.trusted = item.in_place
        in_place = min(self._policy.end(tracked, item.in_place), tracked.trusted)
        if tracked.spoiled_from is not None:
            in_place = min(in_place, tracked.spoiled_from)
        return tracked.store(self._index, item.computed, in_place)

    def _rest(self, tracked: RequestState, blocks: Sequence[int]) -> list[Move]:
        """What is left to store of a request that has ended; its blocks are still its own."""
        in_place = min(self._rest_end(tracked, blocks), self._requests.trusted_tokens(blocks))
        if self._num_ranks > 1 and self._steps.awaits_load:
            in_place = min(in_place, tracked.trusted)
        if not tracked.has_rest(in_place):
            return []
        spans = tracked.store_rest(self._index, in_place)
        return [self._moves.order(tracked, blocks, span) for span in spans]

    def _rest_end(self, tracked: RequestState, blocks: Sequence[int]) -> int:
        """Tokens of a request that has ended whose KV is in `blocks`, of those that are to be stored."""
        # The last token was sampled; what stands in its place may be that of a draft.
        request: Any = tracked.request
        known, computed = int(request.num_tokens) - 1, int(request.num_computed_tokens)
        return self._policy.end(tracked, min(known, computed, self._moves.num_slots(blocks)))
