"""Where the segments of prompts are cached, and what lower tiers bring of them while their prompts wait."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

from lwkv.blend.request import Segment
from lwkv.blend.segment_cache import segment_keys
from lwkv.integrations.vllm.blending.scheduler.plan import BlendPlan
from lwkv.integrations.vllm.blending.scheduler.prompt_chunks import (
    KeyedSegment,
    LookUp,
    PromptChunks,
    segments_of,
)
from lwkv.integrations.vllm.scheduler.lookup.found_chunks import ASK_AGAIN_S
from lwkv.integrations.vllm.scheduler.lookup.index import ChunkIndex, RankKeys
from lwkv.integrations.vllm.scheduler.lookup.look_ups import LookUps
from lwkv.integrations.vllm.scheduler.lookup.waiting_loads import WaitingLoads, Wanted
from lwkv.platforms.protocol import Int64s
from lwkv.storage.tier import HOST
from lwkv.transfer import Chunking

Found: TypeAlias = "Sequence[Sequence[str | None]]"


class SegmentTiers:
    """Looks segments up, and has lower tiers bring them. For the scheduler's thread; it waits for no tier.

    Args:
        waiting: the loads that requests wait for.
        look_ups: into lower tiers.
        shared_prefix: token ids that segments are computed behind.
        fetches: whether prompts wait for what is in lower tiers; if not, it is taken for not cached.
    """

    def __init__(
        self,
        index: ChunkIndex,
        waiting: WaitingLoads,
        look_ups: LookUps,
        chunk_size: int,
        shared_prefix: Sequence[int],
        fetches: bool,
    ) -> None:
        self._index, self._waiting, self._look_ups = index, waiting, look_ups
        self._chunking = Chunking(chunk_size, partial=True)
        self._prefix, self._fetches = shared_prefix, fetches

    @property
    def can_name(self) -> bool:
        """Whether all ranks are known: keys depend on them."""
        return bool(self._index.namespaces)

    def chunks(self, tokens: Int64s, parts: Sequence[Segment], salts: Sequence[str]) -> PromptChunks:
        """The chunks of `parts` of a prompt's tokens, int64 (tokens,)."""
        return PromptChunks([KeyedSegment(part, self._keys(tokens, part, salts)) for part in parts])

    def has_looked_up(self, chunks: PromptChunks) -> bool:
        """Whether it is known what lower tiers have; where it is not, a look-up is under way."""
        if not self._fetches:
            return True
        if chunks.look_up is None:
            if not self._has_to_look_up(chunks):
                return True
            keys = [part.keys for part in chunks.segments if self._index.asks_lower_tiers(part.keys)]
            if not keys:
                self._take_over(chunks, [], [], self._index.changes)
                return True
            answer = self._look_ups.begin(partial(self._index.found_in, keys))
            chunks.look_up = LookUp(keys, self._index.changes, answer)
        look_up = chunks.look_up
        if not look_up.answer.done():
            return False
        chunks.look_up = None
        found = [] if look_up.answer.cancelled() else look_up.answer.result()
        self._take_over(chunks, look_up.keys, found, look_up.changes)
        return True

    def cached(
        self, chunks: PromptChunks, num_exact: int, with_lower_tiers: bool = False
    ) -> list[tuple[Segment, int]]:
        """The segments, each with how many of its leading tokens are in host memory, or in any tier.

        Those in front of token `num_exact` of the prompt need not be there.
        """
        below = chunks.below if with_lower_tiers else frozenset()
        counts: list[tuple[Segment, int]] = []
        for segment in chunks.segments:
            end = self._there(segment, num_exact, below).stop
            tokens = self._chunking.chunk_tokens(segment.part.end - segment.part.start)
            counts.append((segment.part, int(tokens[:end].sum())))
        return counts

    def is_cached(self, segment: KeyedSegment, chunks: PromptChunks) -> bool:
        """Whether all of a segment is in some tier."""
        return self._there(segment, 0, chunks.below).stop == len(segment.keys[0])

    def bring(self, request_id: str, chunks: PromptChunks, plan: BlendPlan) -> bool:
        """Have what a plan needs brought to host memory, where some is not there; whether the prompt waits.

        It waits as long as for its exact prefix, for both together.
        """
        most = self._most_chunks()
        wanted = self._wanted(chunks, plan) if most else []
        if all(self._index.has(keys, chunk) for keys, *span in wanted for chunk in range(*span)):
            return False
        since = self._waiting.since(request_id)
        self._waiting.begin_all(segments_of(request_id), wanted, most, since)
        return self.waits(request_id)

    def waits(self, request_id: str) -> bool:
        """Whether a prompt has to wait on for what lower tiers bring of its segments."""
        return self._waiting.waits(segments_of(request_id), self._most_chunks())

    def has_begun(self, request_id: str) -> bool:
        """Whether lower tiers were to bring what a prompt needs, since it ran last."""
        return segments_of(request_id) in self._waiting

    def leave(self, request_id: str) -> None:
        """Give back what was brought for a request that has ended."""
        self._waiting.leave(segments_of(request_id))

    def _keys(self, tokens: Int64s, part: Segment, salts: Sequence[str]) -> RankKeys:
        mine, size = tokens[part.start : part.end], self._chunking.chunk_size
        return [segment_keys(mine, size, name, self._prefix, salts) for name in self._index.namespaces]

    def _there(self, segment: KeyedSegment, num_exact: int, below: frozenset[bytes]) -> range:
        """Chunks that are cached without a gap, from the one on that has token `num_exact`."""
        keys = segment.keys
        first = min(max(num_exact - segment.part.start, 0) // self._chunking.chunk_size, len(keys[0]))
        missing = (
            chunk
            for chunk in range(first, len(keys[0]))
            if not self._index.has(keys, chunk) and keys[0][chunk].hash not in below
        )
        return range(first, next(missing, len(keys[0])))

    def _wanted(self, chunks: PromptChunks, plan: BlendPlan) -> list[Wanted]:
        """What a plan loads; what is in host memory too: it is not to go while the rest is brought."""
        wanted = []
        for segment in chunks.segments:
            if segment.part in plan.segments:
                there = self._there(segment, plan.num_exact, chunks.below)
                end = -(-(plan.end - segment.part.start) // self._chunking.chunk_size)
                wanted.append(Wanted(segment.keys, there.start, min(there.stop, end)))
        return wanted

    def _most_chunks(self) -> int:
        """Chunks that may be on their way, or pinned for waiting requests, at a time."""
        return self._index.most_chunks // 2

    def _has_to_look_up(self, chunks: PromptChunks) -> bool:
        """Whether the last answer does not count any more. While a prompt waits, vLLM asks every step."""
        if chunks.found_at is None or self._index.clock() - chunks.found_at >= ASK_AGAIN_S:
            return True
        if chunks.found_after == self._index.changes:
            return False
        if self._index.has_news(chunks.hashes(), chunks.found_after):
            return True
        chunks.found_after = self._index.changes
        return False

    def _take_over(self, chunks: PromptChunks, keys: Sequence[RankKeys], found: Found, changes: int) -> None:
        chunks.below = frozenset(
            key.hash
            for own, tiers in zip(keys, found, strict=False)
            for key, tier in zip(own[0], tiers, strict=False)
            if tier is not None and tier != HOST
        )
        chunks.found_at, chunks.found_after = self._index.clock(), changes
