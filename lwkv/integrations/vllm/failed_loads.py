"""Has vLLM compute again, from the start, the prompts whose loads failed in a step.

vLLM's own way (`Scheduler._handle_invalid_blocks`, 0.20 to 0.32) sets such a request back and leaves it
running. That is wrong where the next step was scheduled before the result of this one came, which is vLLM's
default on GPUs (`async_scheduling`): the next step's token was computed from blocks without data, and the
user gets it; places for tokens that never come are scheduled, and the engine ends. It is wrong too with
vLLM's second model runner, which keeps the number of computed tokens on the device. Both are reported as
vllm-project/vllm#49250.

So the request is preempted, as vLLM itself does in `reset_prefix_cache(reset_running_requests=True)`: its
blocks are given back, what is under way for it is discarded, and it comes again as one that waits. Blocks
without data, and all that was computed from them, leave vLLM's prefix cache. vLLM looks at running requests
only. Here those that were preempted since, and blocks of those that were aborted since, are looked at too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Set
from functools import wraps
from typing import Any

log = logging.getLogger(__name__)


def preempt_failed_loads(scheduler_class: Any) -> None:
    """Have all schedulers of that class preempt requests whose loads failed. A second call does nothing."""
    if not hasattr(scheduler_class, "lwkv_result"):
        scheduler_class.lwkv_result = None
        scheduler_class.update_from_output = _noting_result(scheduler_class.update_from_output)
        scheduler_class._handle_invalid_blocks = _preempting(scheduler_class._handle_invalid_blocks)


def _noting_result(update: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(update)
    def noting(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        self.lwkv_result = model_runner_output
        try:
            return update(self, scheduler_output, model_runner_output)
        finally:
            self.lwkv_result = None

    return noting


def _preempting(handle: Callable[..., set[str]]) -> Callable[..., set[str]]:
    @wraps(handle)
    def preempting(self: Any, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]) -> set[str]:
        stepped = [self.requests[name] for name in num_scheduled_tokens if name in self.requests]
        gone = [request for request in stepped if _was_preempted(request)]
        if self.recompute_kv_load_failures and not _can_discard(self, [*self.running, *gone]):
            log.warning(
                "this vLLM schedules ahead and cannot discard what is under way: requests whose loads fail "
                "end with an error; set --no-async-scheduling to have them computed again"
            )
            self.recompute_kv_load_failures = False
        _evict(self, invalid_block_ids)
        failed = handle(self, invalid_block_ids, num_scheduled_tokens)
        if self.recompute_kv_load_failures:
            # In reverse, since each one goes to the front of those that wait.
            for request in [request for request in reversed(self.running) if request.request_id in failed]:
                _preempt(self, request)
            for request in gone:
                _discard(request, _num_results_coming(self, request))
        # Their tokens of this step are not taken either: they may have been computed from these blocks.
        return failed | {request.request_id for request in gone}

    return preempting


def _was_preempted(request: Any) -> bool:
    """Whether a request of the step was preempted since; it may run again by now."""
    is_waiting: bool = request.status.name == "PREEMPTED"
    return is_waiting or getattr(request, "num_stale_output_tokens", 0) > 0


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


def _evict(scheduler: Any, invalid: Set[int]) -> None:
    """Take what was not loaded, and all that was computed from it, out of vLLM's prefix cache."""
    manager, known = scheduler.kv_cache_manager, set[int]()
    for request in scheduler.running:
        (blocks,) = manager.get_block_ids(request.request_id)
        known.update(blocks)
        first = next((number for number, block in enumerate(blocks) if block in invalid), len(blocks))
        manager.evict_blocks(set(blocks[first:]))
    if not invalid <= known:
        # Of a request that runs no more. Which blocks were computed from these is not known any more.
        manager.evict_blocks(set(range(len(manager.block_pool.blocks))))


def _preempt(scheduler: Any, request: Any) -> None:
    num_coming = _num_results_coming(scheduler, request)
    scheduler.running.remove(request)
    scheduler._preempt_request(request, time.monotonic())
    _discard(request, num_coming)
    # It may be scheduled again at once, and then as one that was not in the step before.
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def _discard(request: Any, num_coming: int) -> None:
    """Have vLLM discard what is under way for a request that was preempted."""
    if hasattr(request, "drop_stale_output"):
        # vLLM has noted what is under way; by itself it would still deliver these tokens.
        request.drop_stale_output = True
    else:
        request.async_tokens_to_discard = num_coming
        request.num_output_placeholders = 0


def _num_results_coming(scheduler: Any, request: Any) -> int:
    """Results with a token for that request that are under way, without the one that has just come.

    vLLM reserves a place for each token that a step will bring.
    """
    output = scheduler.lwkv_result
    number, places = output.req_id_to_index.get(request.request_id), int(request.num_output_placeholders)
    has_come = number is not None and output.sampled_token_ids and output.sampled_token_ids[number]
    return places - bool(has_come)
