"""Requests whose loads failed are preempted: what is under way for them is discarded, and they come again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from lwkv.integrations.vllm.failed_loads import preempt_failed_loads


class Status(Enum):
    """As vLLM's, of which the names count."""

    RUNNING = 1
    PREEMPTED = 2
    WAITING_FOR_REMOTE_KVS = 3
    FINISHED_ABORTED = 4


@dataclass
class OldRequest:
    """Of a vLLM that can discard nothing."""

    request_id: str
    num_output_placeholders: int = 0
    status: Status = Status.RUNNING

    def is_finished(self) -> bool:
        return self.status is Status.FINISHED_ABORTED


@dataclass
class Request(OldRequest):
    """As vLLM 0.22 has it."""

    async_tokens_to_discard: int = 0
    pooling_params: object = None


@dataclass
class LaterRequest(OldRequest):
    """As vLLM 0.32 has it."""

    num_stale_output_tokens: int = 0
    num_in_flight_tokens: int = 0
    drop_stale_output: bool = False


@dataclass
class Manager:
    tables: dict[str, list[int]]
    evicted: set[int] = field(default_factory=set)
    block_pool: Any = field(default_factory=lambda: SimpleNamespace(blocks=[None] * 8))

    def get_block_ids(self, request_id: str) -> tuple[list[int]]:
        return (self.tables[request_id],)

    def evict_blocks(self, blocks: set[int]) -> None:
        self.evicted |= blocks


class Scheduler:
    """The parts of vLLM's scheduler that take part in this."""

    def __init__(
        self,
        tables: dict[str, list[int]],
        running: list[Any],
        ahead: bool = True,
        waiting: Sequence[Any] = (),
        pipelined: int = 1,
    ) -> None:
        self.kv_cache_manager = Manager(tables)
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[None])
        self.running, self.waiting = running, list[Any](waiting)
        self.requests = {request.request_id: request for request in [*running, *waiting]}
        self.scheduler_config = SimpleNamespace(async_scheduling=ahead)
        parallel = SimpleNamespace(pipeline_parallel_size=pipelined)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.recompute_kv_load_failures = True
        self.num_spec_tokens = 0
        self.prev_step_scheduled_req_ids = {request.request_id for request in running}
        self.failed: set[str] = set()

    def schedule(self, began: dict[str, list[int]], grew: dict[str, list[int]] | None = None) -> Any:
        """A step in which requests begin with blocks, and get more."""
        new = [SimpleNamespace(req_id=name, block_ids=(blocks,)) for name, blocks in began.items()]
        more = [(blocks,) for blocks in (grew or {}).values()]
        cached = SimpleNamespace(req_ids=list(grew or {}), new_block_ids=more, resumed_req_ids=set())
        return SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> None:
        invalid, names = model_runner_output.invalid, model_runner_output.req_id_to_index
        self.failed = self._handle_invalid_blocks(invalid, dict.fromkeys(names, 1))

    def _handle_invalid_blocks(self, invalid: set[int], num_scheduled_tokens: dict[str, int]) -> set[str]:
        tables = self.kv_cache_manager.tables
        return {request.request_id for request in self.running if invalid & set(tables[request.request_id])}

    def _preempt_request(self, request: Any, timestamp: float) -> None:
        request.status = Status.PREEMPTED
        if hasattr(request, "num_in_flight_tokens"):
            request.num_stale_output_tokens = request.num_in_flight_tokens
            request.num_output_placeholders = 0
        self.waiting.insert(0, request)


@pytest.fixture
def scheduler_class() -> type[Scheduler]:
    class Own(Scheduler):
        pass

    preempt_failed_loads(Own)
    preempt_failed_loads(Own)
    return Own


def step_ended(
    scheduler: Scheduler, invalid: set[int], sampled: dict[str, list[int]], step: Any = None
) -> None:
    """The result of a step comes: blocks that were not loaded, and tokens of each request in the step."""
    output = SimpleNamespace(
        req_id_to_index={name: number for number, name in enumerate(sampled)},
        sampled_token_ids=list(sampled.values()),
        invalid=invalid,
    )
    scheduler.update_from_output(step, output)


def test_what_was_computed_from_it_leaves_the_prefix_cache_and_the_request_waits_again(
    scheduler_class: type[Scheduler],
) -> None:
    broken, right = Request("broken"), Request("right")
    scheduler = scheduler_class({"broken": [1, 2, 3, 4], "right": [1, 5]}, [broken, right])
    step_ended(scheduler, {3}, {"broken": [], "right": [7]})
    assert scheduler.kv_cache_manager.evicted == {3, 4}
    assert (scheduler.running, scheduler.waiting) == ([right], [broken])
    assert scheduler.failed == {"broken"}
    assert scheduler.prev_step_scheduled_req_ids == {"right"}


def test_those_that_fail_together_wait_in_the_order_in_which_they_ran(
    scheduler_class: type[Scheduler],
) -> None:
    requests = [Request(name) for name in "abc"]
    scheduler = scheduler_class({"a": [1], "b": [2], "c": [1, 3]}, list(requests))
    step_ended(scheduler, {1}, {"a": [5], "b": [6], "c": []})
    assert scheduler.waiting == [requests[0], requests[2]]


@pytest.mark.parametrize(
    ("places", "sampled", "coming"),
    [(0, [], 0), (1, [9], 0), (1, [], 1), (2, [9], 1), (3, [9], 2)],
    ids=[
        "a part of a prompt",
        "the last step",
        "the step after it samples first",
        "one step ahead",
        "two steps ahead",
    ],
)
def test_as_many_results_are_discarded_as_are_under_way(
    scheduler_class: type[Scheduler], places: int, sampled: list[int], coming: int
) -> None:
    request = Request("a", num_output_placeholders=places)
    step_ended(scheduler_class({"a": [1]}, [request]), {1}, {"a": sampled})
    assert (request.async_tokens_to_discard, request.num_output_placeholders) == (coming, 0)


def test_a_request_that_shares_a_block_and_is_first_in_the_next_step_is_preempted_too(
    scheduler_class: type[Scheduler],
) -> None:
    request = Request("later", num_output_placeholders=1)
    step_ended(scheduler_class({"later": [1]}, [request]), {1}, {"other": [3]})
    assert (request.status, request.async_tokens_to_discard) == (Status.PREEMPTED, 1)


def test_where_vllm_notes_what_is_under_way_its_tokens_are_dropped(scheduler_class: type[Scheduler]) -> None:
    request = LaterRequest("a", num_output_placeholders=2, num_in_flight_tokens=9)
    step_ended(scheduler_class({"a": [1]}, [request]), {1}, {"a": [9]})
    assert (request.num_stale_output_tokens, request.drop_stale_output) == (9, True)


def test_where_vllm_fails_such_requests_nothing_is_preempted(scheduler_class: type[Scheduler]) -> None:
    request = Request("a", num_output_placeholders=2)
    scheduler = scheduler_class({"a": [1]}, [request])
    scheduler.recompute_kv_load_failures = False
    step_ended(scheduler, {1}, {"a": [9]})
    assert (scheduler.running, scheduler.failed) == ([request], {"a"})


def test_where_nothing_can_be_discarded_such_requests_fail_rather_than_give_wrong_tokens(
    scheduler_class: type[Scheduler], caplog: pytest.LogCaptureFixture
) -> None:
    request = OldRequest("a", num_output_placeholders=2)
    scheduler = scheduler_class({"a": [1]}, [request])
    step_ended(scheduler, {1}, {"a": [9]})
    assert not scheduler.recompute_kv_load_failures
    assert scheduler.running == [request]
    assert "--no-async-scheduling" in caplog.text


def test_where_no_step_is_scheduled_ahead_there_is_nothing_to_discard(
    scheduler_class: type[Scheduler],
) -> None:
    request = OldRequest("a")
    scheduler = scheduler_class({"a": [1]}, [request], ahead=False)
    step_ended(scheduler, {1}, {"a": [9]})
    assert (request.status, scheduler.recompute_kv_load_failures) == (Status.PREEMPTED, True)


@pytest.mark.parametrize("make", [Request, LaterRequest])
def test_a_request_that_was_preempted_before_the_result_came_gets_no_token_of_it(
    scheduler_class: type[Scheduler], make: Callable[..., Any]
) -> None:
    request, other = make("a", num_output_placeholders=2), make("old", num_output_placeholders=1)
    scheduler = scheduler_class({}, [], waiting=[request, other])
    step = scheduler.schedule({"a": [1, 2]}, {"old": [6]})
    request.status = other.status = Status.PREEMPTED
    step_ended(scheduler, {1}, {"a": [9], "old": [8]}, step)
    assert scheduler.failed == {"a"}
    assert getattr(request, "drop_stale_output", True)
    assert getattr(request, "async_tokens_to_discard", 1) == 1
    assert scheduler.kv_cache_manager.evicted == {1, 2}
    # What ran before has not read what was loaded: its token counts.
    assert not getattr(other, "drop_stale_output", False)
    assert other.num_output_placeholders == 1


def test_what_an_aborted_request_has_computed_behind_a_shared_block_leaves_the_prefix_cache(
    scheduler_class: type[Scheduler],
) -> None:
    loads = LaterRequest("loads")
    scheduler = scheduler_class({"loads": [1, 2]}, [loads])
    step = scheduler.schedule({"loads": [1, 2], "aborted": [1, 3]})
    scheduler.schedule({}, {"aborted": [4]})
    step_ended(scheduler, {1}, {"loads": [9], "aborted": []}, step)
    assert scheduler.kv_cache_manager.evicted == {1, 2, 3, 4}


def test_where_the_one_that_loads_was_aborted_those_that_share_its_blocks_are_preempted(
    scheduler_class: type[Scheduler],
) -> None:
    shares, right = LaterRequest("shares"), LaterRequest("right")
    scheduler = scheduler_class({"shares": [1, 4], "right": [2, 7]}, [shares, right])
    first = scheduler.schedule({"aborted": [1, 3], "right": [2, 7]})
    scheduler.schedule({"shares": [1, 4]})
    step_ended(scheduler, {1}, {"aborted": [9], "right": [9]}, first)
    # vLLM up to 0.22 looks each of those up that it is told: one that has ended is not there.
    assert (scheduler.running, scheduler.failed) == ([right], {"shares"})
    assert shares.drop_stale_output
    assert scheduler.kv_cache_manager.evicted == {1, 3, 4}


def test_of_those_that_fail_none_has_ended_since(scheduler_class: type[Scheduler]) -> None:
    loads, ended = Request("loads"), Request("ended")
    scheduler = scheduler_class({"loads": [1, 2]}, [loads], waiting=[ended])
    scheduler.recompute_kv_load_failures = False
    step = scheduler.schedule({"loads": [1, 2], "ended": [1, 3], "gone": [1, 4]})
    ended.status = Status.FINISHED_ABORTED
    step_ended(scheduler, {1}, {"loads": [9], "ended": [9], "gone": [9]}, step)
    assert scheduler.failed == {"loads"}
    assert scheduler.kv_cache_manager.evicted == {1, 2, 3, 4}


def test_a_request_is_found_whose_blocks_without_data_were_given_to_others_behind_its_window(
    scheduler_class: type[Scheduler],
) -> None:
    slides = Request("slides", num_output_placeholders=1)
    scheduler = scheduler_class({"slides": [0, 0, 3]}, [slides])
    step = scheduler.schedule({"slides": [1, 2, 3]})
    step_ended(scheduler, {1, 2}, {"slides": [9]}, step)
    assert (slides.status, scheduler.failed) == (Status.PREEMPTED, {"slides"})
    assert scheduler.kv_cache_manager.evicted == {1, 2, 3}


def test_what_rests_on_a_result_of_long_ago_is_not_known_and_nothing_stays_in_the_prefix_cache(
    scheduler_class: type[Scheduler],
) -> None:
    other = Request("other")
    scheduler = scheduler_class({"other": [4, 5]}, [other])
    loaded = scheduler.schedule({"aborted": [1, 3]})
    step_ended(scheduler, set(), {"aborted": [9]}, loaded)
    step_ended(scheduler, {1}, {"other": [3]}, scheduler.schedule({"other": [4, 5]}))
    assert scheduler.kv_cache_manager.evicted == set(range(8))
    assert (scheduler.running, scheduler.failed) == ([other], set())


def test_blocks_that_a_waiting_request_loads_are_in_no_prefix_cache_yet(
    scheduler_class: type[Scheduler],
) -> None:
    waits = LaterRequest("waits", status=Status.WAITING_FOR_REMOTE_KVS)
    scheduler = scheduler_class({"waits": [1, 2]}, [], waiting=[waits])
    step_ended(scheduler, {2}, {}, scheduler.schedule({}))
    assert scheduler.kv_cache_manager.evicted == {2}


def test_vllm_0_22_goes_on_discarding_what_was_under_way_when_a_request_failed_before(
    scheduler_class: type[Scheduler],
) -> None:
    # It came again in a step that is under way, and so is one result of its first run.
    request = Request("a", num_output_placeholders=1, async_tokens_to_discard=1)
    scheduler = scheduler_class({"a": [1]}, [request])
    step_ended(scheduler, {1}, {"a": [9]})
    assert request.async_tokens_to_discard == 1


def test_where_a_model_has_several_groups_vllm_itself_says_why_it_ends() -> None:
    class Several(Scheduler):
        def _handle_invalid_blocks(self, invalid: set[int], scheduled: dict[str, int]) -> set[str]:
            raise RuntimeError("several groups")

    preempt_failed_loads(Several)
    scheduler = Several({}, [])
    scheduler.kv_cache_config.kv_cache_groups.append(None)
    with pytest.raises(RuntimeError, match="several groups"):
        step_ended(scheduler, {1}, {})


def test_vllm_0_22_fails_such_requests_where_it_counts_too_little(
    scheduler_class: type[Scheduler],
) -> None:
    for pipelined, drafts, pooled in [(2, 0, None), (1, 3, None), (1, 0, object())]:
        request = Request("a", num_output_placeholders=1, pooling_params=pooled)
        scheduler = scheduler_class({"a": [1]}, [request], pipelined=pipelined)
        scheduler.num_spec_tokens = drafts
        step_ended(scheduler, {1}, {"a": [9]})
        assert not scheduler.recompute_kv_load_failures
        assert scheduler.running == [request]
