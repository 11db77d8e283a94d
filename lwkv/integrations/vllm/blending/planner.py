"""The scheduler's half of blending: which prompts are blended, up to where, and what is encoded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lwkv.blend.request import Segment
from lwkv.blend.segment_cache import segment_keys
from lwkv.integrations.vllm.blending.block_hashes import can_be_salted, salt
from lwkv.integrations.vllm.blending.orders import BlendOrder, EncodeOrder
from lwkv.integrations.vllm.blending.plan import BlendSizes, Plan, make_plan
from lwkv.integrations.vllm.blending.prompt_segments import PromptSegments
from lwkv.integrations.vllm.blending.settled_blocks import SettledBlocks
from lwkv.keys import ChunkKey
from lwkv.platforms.protocol import Int64s
from lwkv.transfer import Chunking

TRY_AGAIN_S = 30.0
"""Seconds after which a segment is encoded again that was encoded and is still not cached."""


@dataclass(slots=True, eq=False)
class Prompt:
    """A request that has segments.

    Attributes:
        segments: of its prompt, with their keys.
        blended_from: the first token whose KV is, or was, a blend's; None for none.
        plan: what was promised, and is not yet ordered.
    """

    request: Any
    segments: Sequence[tuple[Segment, list[ChunkKey]]]
    blended_from: int | None = None
    plan: Plan | None = None


class BlendPlanner:
    """Follows the requests that have segments. For the scheduler's thread; it waits for nothing.

    A prompt is blended up to the last block that a cached segment fills. A step blends one prompt, and no
    more of it than computes as many rows as a step may have tokens; it encodes as many on top, in blocks
    that the step's forward pass fills afterwards.

    Args:
        is_kept: whether a chunk is in host memory.
        namespace: of the engine's keys; None before its worker was heard of.
        shared_prefix: token ids that segments are computed behind.
        clock: seconds.
    """

    def __init__(
        self,
        sizes: BlendSizes,
        find: PromptSegments,
        shared_prefix: Sequence[int],
        is_kept: Callable[[ChunkKey], bool],
        namespace: Callable[[], str | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sizes, self._find, self._prefix = sizes, find, tuple(shared_prefix)
        self._is_kept, self._namespace, self._clock = is_kept, namespace, clock
        self._chunking = Chunking(sizes.chunk_size, partial=True)
        self._prompts: dict[str, Prompt] = {}
        self._looked_at: dict[str, Any] = {}
        self._settled = SettledBlocks(sizes.block_size)
        self._is_taken = False
        self._rows_encoded = 0
        self._encoded_at: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def follow(self, request: Any, salts: tuple[str, ...]) -> None:
        """Learn of a request, with or without segments, before anything else is asked of it."""
        self._settled.follow(request)
        namespace = self._namespace()
        if namespace is None or self._looked_at.get(request.request_id) is request:
            return
        self._looked_at[request.request_id] = request
        segments = [part for part in self._find.of(request) if part.start > 0 or not self._prefix]
        if segments:
            ids = np.array(request.prompt_token_ids, np.int64)
            keyed = [(part, self._keys(ids[part.start : part.end], namespace, salts)) for part in segments]
            self._prompts[request.request_id] = Prompt(request, keyed)
        else:
            self._prompts.pop(request.request_id, None)

    def end(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._prompts.pop(request_id, None)
        self._looked_at.pop(request_id, None)
        self._settled.end(request_id)

    def reset(self) -> None:
        """Find nothing any more of what was encoded before."""
        for prompt in self._prompts.values():
            prompt.segments, prompt.plan = (), None
        self._encoded_at.clear()

    def loads_failed(self) -> None:
        """Note that blocks which were thought to be in place may be computed again."""
        self._settled.forget()

    def blended_from(self, request: Any) -> int | None:
        """The first token of a request whose KV is, or was, a blend's or rests on one; None for none."""
        prompt = self._of(request)
        return None if prompt is None else prompt.blended_from

    def claim(self, request: Any, num_local: int, num_exact: int) -> int | None:
        """How many tokens behind `num_local` a blend brings; None while the request is to wait for its step.

        It waits while another prompt is blended, and while a running request may still be computing tokens
        that both have: a blend reads them before the step's forward pass. 0 where it is not blended.

        From here on vLLM's prefix cache finds nothing of it for others that is behind `num_exact`.
        """
        self._settled.wait(request.request_id)
        prompt = self._of(request)
        if prompt is None:
            return 0
        prompt.plan = None
        plan = self._plan(prompt, num_local, num_exact)
        if plan is None:
            return 0
        if self._is_taken or not self._settled.has(request, num_local):
            return None
        salt(request, num_exact // self._sizes.block_size)
        blended_from = (
            plan.num_exact if prompt.blended_from is None else min(prompt.blended_from, plan.num_exact)
        )
        prompt.blended_from, prompt.plan = blended_from, plan
        return plan.end - num_local

    def allocated(self, request: Any, num_loaded: int) -> bool:
        """Whether the `num_loaded` tokens that a request is in the next step with are those of a blend."""
        self._settled.note(request.request_id, 0)
        prompt = self._of(request)
        plan = None if prompt is None else prompt.plan
        if prompt is None or plan is None:
            return False
        if num_loaded != plan.end - plan.num_local:  # vLLM took none of them
            prompt.plan = None
            return False
        self._is_taken = True
        return True

    def begin_step(self, output: Any) -> None:
        """Go on to the step of vLLM's scheduler output, whose orders are asked for from here on."""
        self._is_taken = False
        self._rows_encoded = 0
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
        tokens = np.array(request.all_token_ids[: max(last, plan.end)], np.int64)
        slots = slots_of(blocks, size)[: plan.end]
        return BlendOrder(tokens, salts, slots, plan.num_local, plan.num_exact, plan.segments)

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
        orders = []
        for part, keys in prompt.segments:
            num_rows = len(self._prefix) + part.end - part.start
            if num_rows > min(len(slots), self._sizes.most_rows - self._rows_encoded):
                continue
            if not self._has_to_be_encoded(keys):
                continue
            self._rows_encoded += num_rows
            tokens = np.array(request.prompt_token_ids[part.start : part.end], np.int64)
            orders.append(EncodeOrder(tokens, salts, slots[:num_rows]))
        return orders

    def has_segments(self, request: Any) -> bool:
        """Whether a request is one of those that can be blended, or has segments to encode."""
        return self._of(request) is not None

    def is_planned(self, request: Any) -> bool:
        """Whether a request is in the step that is planned with a blend."""
        prompt = self._of(request)
        return prompt is not None and prompt.plan is not None

    def _of(self, request: Any) -> Prompt | None:
        prompt = self._prompts.get(request.request_id)
        return prompt if prompt is not None and prompt.request is request else None

    def _keys(self, tokens: Int64s, namespace: str, salts: tuple[str, ...]) -> list[ChunkKey]:
        return segment_keys(tokens, self._sizes.chunk_size, namespace, self._prefix, salts)

    def _has_to_be_encoded(self, keys: Sequence[ChunkKey]) -> bool:
        """Whether a chunk is not cached, and was not just encoded; it is from here on."""
        if all(map(self._is_kept, keys)):
            self._encoded_at.pop(keys[-1].hash, None)  # if it is evicted, it is worth another time
            return False
        now = self._clock()
        if now - self._encoded_at.get(keys[-1].hash, -TRY_AGAIN_S) < TRY_AGAIN_S:
            return False
        self._encoded_at = {name: at for name, at in self._encoded_at.items() if now - at < TRY_AGAIN_S}
        self._encoded_at[keys[-1].hash] = now
        return True

    def _plan(self, prompt: Prompt, num_local: int, num_exact: int) -> Plan | None:
        num_tokens = prompt.request.num_tokens
        if num_tokens < self._sizes.min_tokens or not can_be_salted(prompt.request, self._sizes.block_size):
            return None
        cached = [(part, self._num_cached(part, keys)) for part, keys in prompt.segments]
        return make_plan(self._sizes, num_tokens, cached, num_local, num_exact)

    def _num_cached(self, part: Segment, keys: Sequence[ChunkKey]) -> int:
        """Leading tokens of a segment whose chunks are in host memory."""
        counts = self._chunking.chunk_tokens(part.end - part.start)
        chunks = next((i for i, key in enumerate(keys) if not self._is_kept(key)), len(keys))
        return int(counts[:chunks].sum())


def slots_of(blocks: Sequence[int], block_size: int) -> Int64s:
    """The slots of blocks, one after the other, int64 (blocks * block_size,)."""
    starts = np.array(blocks, np.int64)[:, None] * block_size
    slots: Int64s = (starts + np.arange(block_size)).reshape(-1)
    return slots
