"""Has vLLM compute again, from the start, the prompts whose loads failed in a step.

vLLM's own way (`Scheduler._handle_invalid_blocks`, 0.20 to 0.32) sets such a request back and leaves it
running. That is wrong where the next step was scheduled before the result of this one came, which is vLLM's
default on GPUs (`async_scheduling`): the next step's token was computed from blocks without data, and the
user gets it; places for tokens that never come are scheduled, and the engine ends. It is wrong too with
vLLM's second model runner, which keeps the number of computed tokens on the device. Both are reported as
vllm-project/vllm#49250.

So the request is preempted, as vLLM itself does in `reset_prefix_cache(reset_running_requests=True)`: its
blocks are given back, what is under way for it is discarded, and it comes again as one that waits. Blocks
without data, and all that was computed from them, leave vLLM's prefix cache. vLLM looks at the blocks that
running requests have now. Here those are looked at that any request had when it was scheduled, be it
preempted or aborted since.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Set
from functools import wraps
from typing import Any

from lwkv.integrations.vllm.steps_under_way import Spoiled, StepsUnderWay, Table, spoiled

log = logging.getLogger(__name__)


def preempt_failed_loads(scheduler_class: Any) -> None:
    """Have all schedulers of that class preempt requests whose loads failed. A second call does nothing."""
    if not hasattr(scheduler_class, "lwkv_result"):
        scheduler_class.lwkv_result = None
        scheduler_class.schedule = _noting_step(scheduler_class.schedule)
        scheduler_class.update_from_output = _noting_result(scheduler_class.update_from_output)
        scheduler_class._handle_invalid_blocks = _preempting(scheduler_class._handle_invalid_blocks)


def _noting_step(schedule: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(schedule)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = schedule(self, *args, **kwargs)
        _under_way(self).scheduled(output)
        return output

    return noting


def _noting_result(update: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(update)
    def noting(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        self.lwkv_result = model_runner_output
        _under_way(self).result_comes(scheduler_output)
        try:
            return update(self, scheduler_output, model_runner_output)
        finally:
            self.lwkv_result = None
            _under_way(self).result_came(scheduler_output)

    return noting


def _under_way(scheduler: Any) -> StepsUnderWay:
    """The steps of a scheduler, which may be older than the first connector of lwkv."""
    if not hasattr(scheduler, "lwkv_steps"):
        scheduler.lwkv_steps = StepsUnderWay()
    steps: StepsUnderWay = scheduler.lwkv_steps
    return steps


def _preempting(handle: Callable[..., set[str]]) -> Callable[..., set[str]]:
    @wraps(handle)
    def preempting(self: Any, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]) -> set[str]:
        if len(self.kv_cache_config.kv_cache_groups) > 1:
            return handle(self, invalid_block_ids, num_scheduled_tokens)  # it raises, and says why
        tables = [*_under_way(self).tables(), *_tables(self, self.running)]
        found = spoiled(invalid_block_ids, tables)
        if self.recompute_kv_load_failures and not _can_discard(self, _known(self, found.requests)):
            log.warning(
                "this vLLM schedules ahead and cannot discard what is under way: requests whose loads fail "
                "end with an error; set --no-async-scheduling to have them computed again"
            )
            self.recompute_kv_load_failures = False
        # vLLM looks at requests that wait for a load as well, which may share such blocks.
        named = handle(self, found.blocks, num_scheduled_tokens)
        # None that has ended: up to 0.22, vLLM ends where it is to fail one that it does not know.
        failed = named | {request.request_id for request in _known(self, found.requests)}
        _evict(self, invalid_block_ids, found, tables)
        if self.recompute_kv_load_failures:
            _preempt(self, failed)
        return failed

    return preempting


def _tables(scheduler: Any, requests: Iterable[Any]) -> list[Table]:
    """The blocks that requests have now."""
    manager = scheduler.kv_cache_manager
    return [Table(request.request_id, manager.get_block_ids(request.request_id)[0]) for request in requests]


def _known(scheduler: Any, names: Iterable[str]) -> list[Any]:
    """Those requests that have not ended."""
    requests = map(scheduler.requests.get, names)
    return [request for request in requests if request is not None and not request.is_finished()]


def _can_discard(scheduler: Any, requests: list[Any]) -> bool:
    """Whether vLLM can discard the results of steps that are under way for requests, or none ever is."""
    config = scheduler.vllm_config
    is_pipelined = config.parallel_config.pipeline_parallel_size > 1
    is_ahead = scheduler.scheduler_config.async_scheduling
    if not (is_ahead or is_pipelined) or all(hasattr(request, "drop_stale_output") for request in requests):
        return True
    # vLLM 0.22 counts results with one token each, of steps that are scheduled ahead.
    are_counted = all(hasattr(request, "async_tokens_to_discard") for request in requests)
    are_pooled = any(getattr(request, "pooling_params", None) is not None for request in requests)
    return are_counted and not (is_pipelined or scheduler.num_spec_tokens or are_pooled)


def _evict(scheduler: Any, invalid: Set[int], found: Spoiled, tables: Iterable[Table]) -> None:
    """Take what was not loaded, and all that was computed from it, out of vLLM's prefix cache."""
    manager = scheduler.kv_cache_manager
    waiting = [request for request in scheduler.requests.values() if _waits_for_load(request)]
    known = {block for table in (*tables, *_tables(scheduler, waiting)) for block in table.blocks}
    if invalid <= known:
        manager.evict_blocks(found.blocks)
    else:
        # Of a step whose result has come long ago: what was computed from these is not known any more.
        manager.evict_blocks(set(range(len(manager.block_pool.blocks))))


def _waits_for_load(request: Any) -> bool:
    is_waiting: bool = request.status.name == "WAITING_FOR_REMOTE_KVS"
    return is_waiting


def _preempt(scheduler: Any, names: Set[str]) -> None:
    """Have requests come again, those that run as well as those that were preempted since the step."""
    running = [request for request in scheduler.running if request.request_id in names]
    coming = {request.request_id: _num_coming(scheduler, request) for request in _known(scheduler, names)}
    # In reverse, since each one goes to the front of those that wait.
    for request in reversed(running):
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic())
        # It may be scheduled again at once, and then as one that was not in the step before.
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    for request in _known(scheduler, names):
        _discard(request, coming[request.request_id])


def _discard(request: Any, num_coming: int) -> None:
    """Have vLLM discard what is under way for a request that was preempted."""
    if hasattr(request, "drop_stale_output"):
        # vLLM has noted what is under way; by itself it would still deliver these tokens.
        request.drop_stale_output = True
    elif hasattr(request, "async_tokens_to_discard"):
        request.async_tokens_to_discard = num_coming
        request.num_output_placeholders = 0


def _num_coming(scheduler: Any, request: Any) -> int:
    """Results with a token for that request that are under way, without the one that has just come.

    vLLM reserves a place for each token that a step will bring, and counts those that it discards already.
    """
    coming = int(request.num_output_placeholders) + int(getattr(request, "async_tokens_to_discard", 0))
    output = scheduler.lwkv_result
    number = output.req_id_to_index.get(request.request_id)
    has_come = number is not None and output.sampled_token_ids and output.sampled_token_ids[number]
    return coming - bool(coming and has_come)
