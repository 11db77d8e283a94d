"""The scheduler's half of blending: which prompts are blended, up to where, and what is encoded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lwkv.integrations.vllm.blending.orders import BlendOrder, EncodeOrder
from lwkv.integrations.vllm.blending.scheduler.block_hashes import can_be_salted, salt
from lwkv.integrations.vllm.blending.scheduler.encodes import Encodes, slots_of
from lwkv.integrations.vllm.blending.scheduler.plan import BlendPlan, BlendSizes, beside_others, make_plan
from lwkv.integrations.vllm.blending.scheduler.prompt_chunks import PromptChunks
from lwkv.integrations.vllm.blending.scheduler.prompt_segments import PromptSegments
from lwkv.integrations.vllm.blending.scheduler.segment_tiers import SegmentTiers
from lwkv.integrations.vllm.blending.scheduler.settled_blocks import SettledBlocks
from lwkv.platforms.protocol import Int64s
from lwkv.telemetry.counters import Counters
from lwkv.telemetry.log_throttle import LogThrottle

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class SegmentedPrompt:
    """A request that has segments.

    Attributes:
        chunks: of its prompt's segments.
        blended_from: the first token whose KV is, or was, a blend's; None for none.
        plan: what was promised, and is not yet ordered.
        waits_since: when it began to wait for tokens that another request computes; None for not.
        is_given_up: whether it has waited too long for them.
        under_way: what steps of others bring while it waits; None for nothing.
        has_failed: whether such a one has brought nothing.
        had_plan: whether something could be blended when it was looked at last.
    """

    request: Any
    chunks: PromptChunks
    blended_from: int | None = None
    plan: BlendPlan | None = None
    waits_since: float | None = None
    is_given_up: bool = False
    under_way: BlendPlan | None = None
    has_failed: bool = False
    had_plan: bool = False


class BlendPlanner:
    """Follows the requests that have segments. For the scheduler's thread; it waits for nothing.

    A prompt is blended up to the last block that a cached segment fills. A step blends one prompt, and no
    more of it than computes as many rows as a step may have tokens; it encodes as many on top, in blocks
    that the step's forward pass fills afterwards.

    Where others are running, their steps do a part of the blend each, and its request waits, with the blocks
    that it fills. There is one such blend at a time.

    What is in lower tiers is brought to host memory first, while the prompt waits to be scheduled.

    Args:
        shared_prefix: token ids that segments are computed behind.
        tiers: where segments are cached.
        timeout_s: for how long a prompt waits for tokens that another request computes.
        clock: seconds.
    """

    def __init__(
        self,
        sizes: BlendSizes,
        find: PromptSegments,
        shared_prefix: Sequence[int],
        tiers: SegmentTiers,
        counters: Counters,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sizes, self._find, self._has_prefix = sizes, find, len(shared_prefix) > 0
        self._tiers, self._counters, self._timeout_s, self._clock = tiers, counters, timeout_s, clock
        self._encodes = Encodes(len(shared_prefix), sizes.most_rows, tiers.is_cached, clock)
        self._throttle = LogThrottle(log)
        self._prompts: dict[str, SegmentedPrompt] = {}
        self._looked_at: dict[str, Any] = {}
        self._settled = SettledBlocks(sizes.block_size)
        self._is_taken = False
        self._begun: tuple[Any, Sequence[int]] | None = None
        self._waiting: str | None = None

    def __len__(self) -> int:
        return len(self._prompts)

    def follow(self, request: Any, salts: tuple[str, ...]) -> None:
        """Learn of a request, with or without segments, before anything else is asked of it."""
        self._settled.follow(request)
        if not self._tiers.can_name or self._looked_at.get(request.request_id) is request:
            return
        self._looked_at[request.request_id] = request
        self._tiers.leave(request.request_id)  # of another one of that name
        segments = [part for part in self._find.of(request) if part.start > 0 or not self._has_prefix]
        if segments:
            ids = np.array(request.prompt_token_ids, np.int64)
            chunks = self._tiers.chunks(ids, segments, salts)
            self._prompts[request.request_id] = SegmentedPrompt(request, chunks)
        else:
            self._prompts.pop(request.request_id, None)

    def end(self, request_id: str) -> None:
        """Forget a request that has ended, and give back what was brought for it."""
        self._tiers.leave(request_id)
        self._prompts.pop(request_id, None)
        self._looked_at.pop(request_id, None)
        self._settled.end(request_id)

    def reset(self) -> None:
        """Find nothing any more of what was encoded before."""
        for name, prompt in self._prompts.items():
            self._tiers.leave(name)
            prompt.chunks, prompt.plan = PromptChunks(()), None
        self._encodes.reset()

    def loads_failed(self) -> None:
        """Note that blocks which were thought to be in place may be computed again."""
        self._settled.forget()

    def blended_from(self, request: Any) -> int | None:
        """The first token of a request whose KV is, or was, a blend's or rests on one; None for none."""
        prompt = self._of(request)
        return None if prompt is None else prompt.blended_from

    def claim(self, request: Any, num_local: int, num_exact: int) -> int | None:
        """How many tokens behind `num_local` a blend brings; None while the request is to wait for its step.

        It waits while lower tiers bring its segments, while another prompt is blended, and while a running
        request may still be computing tokens that both have: a blend reads them before the step's forward
        pass. 0 where it is not blended.

        From here on vLLM's prefix cache finds nothing of it for others that is behind `num_exact`.
        """
        self._settled.wait(request.request_id)
        prompt = self._of(request)
        if prompt is None:
            return 0
        prompt.plan = None
        # Asked about again: its blend has failed.
        prompt.has_failed |= prompt.under_way is not None
        prompt.under_way = None
        if prompt.has_failed:
            return 0
        if self._awaits_tiers(prompt, num_local, num_exact):
            return None
        is_next = not self._is_taken and self._waiting is None
        if prompt.had_plan and not is_next:  # all that wait are asked about in every step
            return None
        plan = self._plan(prompt, num_local, num_exact)
        prompt.had_plan = plan is not None
        if plan is None:
            return 0
        if not is_next:
            return None
        if not self._settled.has(request, num_local):
            return None if self._awaits_blocks(prompt) else 0
        if self._sizes.in_parts and self._settled.has_others(request.request_id):
            plan = beside_others(self._sizes, plan, request.num_tokens)
        salt(request, num_exact // self._sizes.block_size)
        blended_from = (
            plan.num_exact if prompt.blended_from is None else min(prompt.blended_from, plan.num_exact)
        )
        prompt.blended_from, prompt.plan = blended_from, plan
        return plan.claimed

    def allocated(self, request: Any, blocks: Sequence[int], num_loaded: int) -> bool:
        """Whether the `num_loaded` tokens that a request has got `blocks` for are those of a blend."""
        self._settled.note(request.request_id, 0)
        prompt = self._of(request)
        if prompt is None:
            return False
        prompt.waits_since = None
        if self._tiers.has_begun(request.request_id):
            # What lower tiers did not bring in time is computed, and is to be in host memory from then on.
            prompt.chunks.below = frozenset()
        plan = prompt.plan
        if plan is None:
            return False
        if num_loaded != plan.claimed:  # vLLM took none of them
            prompt.plan = None
            return False
        self._is_taken = True
        if plan.waits:
            # It computes nothing itself, and vLLM gives none of its blocks to others.
            self._settled.wait(request.request_id)
            prompt.under_way = plan
            self._begun, self._waiting = (request, list(blocks)), request.request_id
        return True

    def waits_for_blend(self, request: Any) -> bool:
        """Whether what was claimed for a request comes while it waits."""
        prompt = self._of(request)
        return prompt is not None and prompt.plan is not None and prompt.plan.waits

    def is_waiting(self, request: Any) -> bool:
        """Whether a request has got blocks for a blend that it waits for, and was not in a step since."""
        prompt = self._of(request)
        return prompt is not None and prompt.under_way is not None

    def comes_back(self, request: Any) -> int | None:
        """Of a request that has waited for its blend and now gets blocks for a step, the tokens that were in
        place before; said once. None for others."""
        prompt = self._of(request)
        if prompt is None or prompt.under_way is None:
            return None
        before, prompt.under_way = prompt.under_way.num_local, None
        self._settled.note(request.request_id, 0)
        return before

    def take_begun(self) -> tuple[Any, Sequence[int]] | None:
        """The request whose blend begins in this step while it waits, and its blocks; None for none."""
        begun, self._begun = self._begun, None
        return begun

    @property
    def is_under_way(self) -> bool:
        """Whether steps do parts of a blend."""
        return self._waiting is not None

    def blends_ended(self, requests: Collection[str]) -> None:
        """Learn of requests that wait no longer: all ranks have done with their blocks."""
        if self._waiting in requests:
            self._waiting = None

    def stops(self, request_id: str) -> None:
        """Learn of a request that has ended, before the next step says so."""
        self._settled.wait(request_id)

    def begin_step(self, output: Any) -> None:
        """Go on to the step of vLLM's scheduler output, whose orders are asked for from here on."""
        self._is_taken = False
        self._encodes.begin_step()
        self._settled.pass_step(output)

    def blend(self, request: Any, salts: tuple[str, ...], blocks: Sequence[int]) -> BlendOrder | None:
        """The order for what was allocated; None for nothing."""
        prompt = self._of(request)
        plan = None if prompt is None else prompt.plan
        if prompt is None or plan is None:
            return None
        prompt.plan = None
        size, chunk = self._sizes.block_size, self._sizes.chunk_size
        # Keys of chunks need all of their tokens.
        last = max([plan.num_exact + -plan.num_exact % chunk, *(part.end + 1 for part in plan.segments)])
        slots = slots_of(blocks, size)
        question = self._question(slots, plan, request.num_tokens)
        tokens = np.array(request.all_token_ids[: max(last, plan.end + len(question))], np.int64)
        places = slots[: plan.end], plan.num_local, plan.num_exact, plan.segments, question
        return BlendOrder(tokens, salts, *places, request.request_id if plan.waits else None)

    def _question(self, slots: Int64s, plan: BlendPlan, num_tokens: int) -> Int64s:
        """The slots of all tokens behind a blend; none where nobody asks, or the step lacks some of them."""
        sizes, num_behind = self._sizes, num_tokens - plan.end
        is_asked = sizes.asks and num_tokens <= len(slots) and num_behind <= sizes.most_rows
        if plan.waits:
            is_asked = plan.question > 0
        return slots[plan.end : num_tokens] if is_asked else slots[:0]

    def encode(self, request: Any, salts: tuple[str, ...], blocks: Sequence[int]) -> list[EncodeOrder]:
        """Orders for segments of a request that are not cached.

        Args:
            blocks: of the request, that the step's forward pass fills from their first token on, and nobody
                has read or read from.
        """
        prompt = self._of(request)
        if prompt is None:
            return []
        slots = slots_of(blocks, self._sizes.block_size)
        return self._encodes.orders(request, prompt.chunks, salts, slots)

    def has_segments(self, request: Any) -> bool:
        """Whether a request is one of those that can be blended, or has segments to encode."""
        return self._of(request) is not None

    def is_planned(self, request: Any) -> bool:
        """Whether a request is in the step that is planned with a blend."""
        prompt = self._of(request)
        return prompt is not None and prompt.plan is not None

    def _of(self, request: Any) -> SegmentedPrompt | None:
        prompt = self._prompts.get(request.request_id)
        return prompt if prompt is not None and prompt.request is request else None

    def _plan(
        self, prompt: SegmentedPrompt, num_local: int, num_exact: int, with_lower_tiers: bool = False
    ) -> BlendPlan | None:
        num_tokens = prompt.request.num_tokens
        if num_tokens < self._sizes.min_tokens or not can_be_salted(prompt.request, self._sizes.block_size):
            return None
        cached = self._tiers.cached(prompt.chunks, num_exact, with_lower_tiers)
        return make_plan(self._sizes, num_tokens, cached, num_local, num_exact)

    def _awaits_tiers(self, prompt: SegmentedPrompt, num_local: int, num_exact: int) -> bool:
        """Whether a prompt is to wait for what lower tiers have, or have to bring."""
        name = prompt.request.request_id
        if self._tiers.has_begun(name):
            return self._tiers.waits(name)
        if not self._tiers.has_looked_up(prompt.chunks):
            return True
        if not prompt.chunks.below:
            return False
        plan = self._plan(prompt, num_local, num_exact, with_lower_tiers=True)
        return plan is not None and self._tiers.bring(name, prompt.chunks, plan)

    def _awaits_blocks(self, prompt: SegmentedPrompt) -> bool:
        """Whether a prompt is to wait on for tokens that another request may be computing."""
        now = self._clock()
        if prompt.waits_since is None:
            prompt.waits_since = now
        if now - prompt.waits_since < self._timeout_s:
            return True
        if not prompt.is_given_up:
            prompt.is_given_up = True
            self._counters.add("blends_given_up")
            self._throttle.warn(
                "request %s has waited %g s for tokens that another one computes: it is not blended",
                *(prompt.request.request_id, self._timeout_s),
            )
        return False
