"""The requests that vLLM has, and which of them a step has to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import partial
from itertools import compress
from typing import Any

from lwkv.integrations.vllm.orders import NULL_BLOCK
from lwkv.integrations.vllm.scheduler.agenda import Agenda
from lwkv.integrations.vllm.scheduler.request_state import RequestState
from lwkv.integrations.vllm.scheduler.scheduled import ScheduledRequest
from lwkv.integrations.vllm.scheduler.stale_blocks import StaleBlocks
from lwkv.integrations.vllm.scheduler.steps import Steps
from lwkv.integrations.vllm.scheduler.store_policy import StorePolicy


class Requests:
    """Follows requests from their arrival to their end, with their blocks.

    Args:
        make_state: makes the state of a request that is new.
        block_size: tokens of a block of vLLM's block tables.
        window: tokens that the model looks back, where blocks behind them are given to others; else None.
        most_decoded: tokens that a request gets in a step where it only decodes, drafts included.
    """

    def __init__(
        self,
        make_state: Callable[[Any], RequestState],
        steps: Steps,
        policy: StorePolicy,
        block_size: int,
        window: int | None,
        most_decoded: int,
    ) -> None:
        self._make_state = make_state
        self._steps = steps
        self._policy = policy
        self._block_size = block_size
        self._window = window
        self._most_decoded = most_decoded
        self._stale = StaleBlocks(block_size)
        self._agenda = Agenda()
        self._tracked: dict[str, RequestState] = {}
        self._over: set[str] = set()
        self._ended: list[RequestState] = []

    def follow(self, request: Any) -> RequestState:
        """The state of a request, from the first call on; of one whose name is used again, a new one."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.request is not request:
            tracked = self._tracked[request.request_id] = self._make_state(request)
        return tracked

    def find(self, request_id: str) -> RequestState | None:
        """The state of a request that is followed."""
        return self._tracked.get(request_id)

    def is_alone(self) -> bool:
        """Whether there is only one request that has not ended."""
        return len(self._tracked) - len(self._over) == 1

    def finish(self, request_id: str) -> None:
        """Note that a request has ended; the next step's output says so too."""
        if request_id in self._tracked:
            self._over.add(request_id)

    def wake(self, request: RequestState) -> None:
        """Look at a request in the next step."""
        request_id = request.request.request_id
        if self._tracked.get(request_id) is request:
            self._agenda.wake(request_id)

    def end(self, output: Any) -> Set[str]:
        """Follow requests no more that have ended, by a step's output: their names."""
        if not self._steps.awaits_load:
            self._ended.clear()
        self._over.clear()
        ended = set(output.finished_req_ids) - {new.req_id for new in output.scheduled_new_reqs}
        for request_id in ended:
            tracked = self._tracked.pop(request_id, None)
            self._agenda.leave(request_id)
            if tracked is not None:
                # A load may still fail on which it has computed.
                self._ended.append(tracked)
        return ended

    def scheduled(self, output: Any) -> list[ScheduledRequest]:
        """The step's requests that have something to do, with their blocks as they are now."""
        self._follow_blocks(output)
        return list(self._parts(output))

    def pass_step(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Follow which blocks hold wrong contents through a step."""
        self._stale.pass_step(scheduled)

    def let_sleep(self, tracked: RequestState, in_place: int) -> None:
        """Look at a request again when it may have something to do; `in_place` tokens are computed."""
        steps = tracked.steps_asleep(in_place, self._policy.decodes_too, self._most_decoded)
        if not self._policy.stores and not tracked.to_load:
            steps = None
        if steps != 0:
            until = None if steps is None else self._steps.current + 1 + steps
            self._agenda.sleep(tracked.request.request_id, until)

    def trusted_tokens(self, blocks: Sequence[int]) -> int:
        """Leading tokens in `blocks` whose contents are right."""
        return self._stale.trusted_tokens(blocks)

    def learn_failed_blocks(self, blocks: Set[int]) -> None:
        """Learn which blocks vLLM will compute again. What is behind them depends on them."""
        if not blocks:
            return
        self._stale.add(blocks)
        for tracked in self._tracked.values():  # vLLM sets requests back
            self.wake(tracked)
        for tracked in (*self._tracked.values(), *self._ended):
            first = next((i for i, block in enumerate(tracked.blocks) if block in blocks), None)
            if first is not None:
                self._stale.add(tracked.blocks[first:])

    def clear(self) -> None:
        """Follow none of them any more: each is a new one when it is met again."""
        for request_id in self._tracked:
            self._agenda.leave(request_id)
        self._tracked.clear()
        self._over.clear()

    def _follow_blocks(self, output: Any) -> None:
        """Take over the blocks that requests got in this step: few of those that run get any."""
        for new in output.scheduled_new_reqs:
            self._add_blocks(new.req_id, new.block_ids, True)
        cached = output.scheduled_cached_reqs
        for request_id in cached.resumed_req_ids:
            self._add_blocks(request_id, None, True)
        with_blocks = compress(cached.req_ids, cached.new_block_ids)
        for request_id, blocks in zip(with_blocks, filter(None, cached.new_block_ids), strict=True):
            self._add_blocks(request_id, blocks, False)

    def _add_blocks(self, request_id: str, blocks: Any, anew: bool) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.blocks = [] if anew else tracked.blocks
            tracked.blocks += blocks[0] if blocks else ()

    def _parts(self, output: Any) -> Iterator[ScheduledRequest]:
        awake = self._agenda.begin_step(self._steps.current)
        for new in output.scheduled_new_reqs:
            yield from self._part(output, new.req_id, new.num_computed_tokens, True)
        cached = output.scheduled_cached_reqs
        if not awake and not len(self._stale):
            return
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if request_id in awake or len(self._stale):
                anew = request_id in cached.resumed_req_ids
                yield from self._part(output, request_id, computed, anew)

    def _part(self, output: Any, request_id: str, computed: int, anew: bool) -> Iterable[ScheduledRequest]:
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return ()
        in_place = computed + int(output.num_scheduled_tokens.get(request_id, 0))
        waited_for, tracked.waited_for = tracked.waited_for, 0
        begin = computed - tracked.to_load - waited_for
        written = tracked.blocks[begin // self._block_size : -(-in_place // self._block_size)]
        is_touched = self._stale.concern(-1 if anew else tracked.tested_after, written)
        if tracked.is_settled(computed, self._policy.end(tracked, in_place)) and not is_touched:
            self.let_sleep(tracked, in_place)
            return ()
        state = getattr(output, "kv_connector_block_state", None)
        blocks = partial(self._blocks, tracked, state, computed)
        return (ScheduledRequest(tracked, begin, computed, in_place, blocks),)

    def _blocks(self, tracked: RequestState, state: Any, computed: int) -> Sequence[int]:
        """The request's blocks: from vLLM 0.30 on its own word, before that what was followed."""
        given = None if state is None else state.get_block_ids(tracked.request.request_id)
        if given is not None:
            return given[0]  # type: ignore[no-any-return]
        gone = 0 if self._window is None else max(0, computed - self._window + 1) // self._block_size
        return [NULL_BLOCK] * min(gone, len(tracked.blocks)) + tracked.blocks[gone:]
