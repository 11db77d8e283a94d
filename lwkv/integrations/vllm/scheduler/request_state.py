"""One request as the scheduler's half follows it from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lwkv.integrations.vllm.orders import NULL_BLOCK, Move, packed
from lwkv.integrations.vllm.scheduler.lookup.choice import Choice
from lwkv.integrations.vllm.scheduler.lookup.found_chunks import FoundChunks
from lwkv.integrations.vllm.scheduler.lookup.index import ChunkIndex
from lwkv.integrations.vllm.scheduler.request_chunks import RequestChunks
from lwkv.platforms.protocol import Int64s
from lwkv.storage.tier import HOST
from lwkv.transfer import Chunking


class TokenRange(NamedTuple):
    """Tokens [first, end) are moved; their keys stand for the first `num_tokens`."""

    first: int
    end: int
    num_tokens: int


@dataclass(slots=True, eq=False)
class RequestState:
    """A request and how far its chunks are taken care of.

    Attributes:
        chunks: its tokens and their keys.
        found: which of its chunks are cached.
        blocks: vLLM's blocks of it, as of the last step that it was in.
        to_load: tokens that its next step loads.
        waited_for: tokens that came since its last step, while it waited.
        handled: leading tokens whose chunks are cached or were ordered to be stored.
        trusted: leading tokens of which no rank can have computed garbage.
        spoiled_from: tokens from here are garbage, or were computed on some; None for no such.
        asked_at: when it was asked for the first time how much of it can be loaded; None while it runs.
        load_within_s: how long its next step may wait for what it loads from lower tiers.
        choice: how much of what was found last is loaded; None where the costs were not compared.
        blended_from: tokens from here were blended, or rest on such: they are not stored. None for none.
        tested_after: additions to the stale blocks when this request was compared with them last.
    """

    chunks: RequestChunks
    found: FoundChunks
    blocks: list[int] = field(default_factory=list)
    to_load: int = 0
    waited_for: int = 0
    handled: int = 0
    trusted: int = 0
    spoiled_from: int | None = None
    asked_at: float | None = None
    load_within_s: float = float("inf")
    choice: Choice | None = None
    blended_from: int | None = None
    tested_after: int = 0
    _computed: int = 0
    _begun_with: int = 0

    @classmethod
    def follow(cls, request: Any, chunking: Chunking, epoch: str) -> RequestState:
        chunks = RequestChunks.of(request, chunking, epoch)
        return cls(chunks, FoundChunks(chunks))

    @property
    def request(self) -> Any:
        """vLLM's own, which grows as tokens are generated."""
        return self.chunks.request

    def begin(self, blocks: Sequence[int], num_loaded: int, waits: bool = False) -> None:
        """Begin to run in `blocks`, of which the next step loads `num_loaded` tokens.

        Or they come before it, while the request waits.
        """
        self.blocks, self.to_load = list(blocks), 0 if waits else num_loaded
        self.asked_at = None
        # What was ordered in an earlier run may be gone; what is cached now was looked up for this one.
        self.handled = self._computed = 0
        self._begun_with = self.found.num_local + num_loaded

    def come_back(self, blocks: Sequence[int], before: int) -> None:
        """Go on in `blocks` after waiting, with `before` tokens that were in place before that."""
        self.blocks = list(blocks)
        self.waited_for = max(int(self.request.num_computed_tokens) - before, 0)

    def load(self, computed: int) -> TokenRange:
        """What a step has to load, that begins with `computed` tokens in place, the loaded ones included."""
        first, self.to_load = computed - self.to_load, 0
        # The key of the last chunk stands for all of its tokens.
        whole = computed + -computed % self.chunks.chunking.chunk_size
        return TokenRange(first, computed, min(whole, self.chunks.chunking.covered(self.chunks.num_tokens)))

    def store(self, index: ChunkIndex, computed: int, in_place: int) -> list[TokenRange]:
        """The chunks that are whole with `in_place` tokens and may be in no tier, each run of them a span.

        Args:
            computed: tokens that were in place before the step. Where they are fewer than at the last step,
                the request has to compute anew, and what was ordered of it may never have been stored.
        """
        size = self.chunks.chunking.chunk_size
        if in_place < self.request.num_prompt_tokens:
            in_place -= in_place % size
        end = self.chunks.chunking.covered(in_place)
        if computed < max(self._computed, self.handled):
            self._set_back(computed)
        self._computed = computed
        begin, self.handled = self.handled, max(end, self.handled)
        if end <= begin:
            return []
        keys = self.chunks.keys(index, end)
        chunks = range(begin // size, -(-end // size))
        kept = index.are_kept(keys, chunks)
        missing = {
            chunk for chunk, there in zip(chunks, kept, strict=True) if self._may_be_missing(chunk, there)
        }
        firsts = [chunk for chunk in chunks if chunk in missing and chunk - 1 not in missing]
        lasts = [chunk for chunk in chunks if chunk in missing and chunk + 1 not in missing]
        ends = [min(end, size * (chunk + 1)) for chunk in lasts]
        return [TokenRange(size * first, last, last) for first, last in zip(firsts, ends, strict=True)]

    def store_rest(self, index: ChunkIndex, in_place: int) -> list[TokenRange]:
        """As `store`, when the request has ended with `in_place` tokens in place."""
        return self.store(index, max(self._computed, self.handled), in_place)

    def has_rest(self, in_place: int) -> bool:
        """Whether chunks of the first `in_place` tokens are neither cached nor ordered to be stored."""
        return self.spoiled_from is None and self.chunks.chunking.covered(in_place) > self.handled

    def is_settled(self, computed: int, in_place: int) -> bool:
        """Whether a step from `computed` to `in_place` tokens has nothing to load or to store anew."""
        is_whole = min(self.handled, computed) >= self.chunks.chunking.covered(in_place)
        return is_whole and not self.to_load and self.spoiled_from is None

    def steps_asleep(self, in_place: int, decodes_too: bool, most_tokens: int) -> int | None:
        """For how many steps after one with `in_place` tokens there is nothing to do; None for all others.

        Args:
            decodes_too: whether generated tokens are stored.
            most_tokens: that a request gets in a step where it only decodes.
        """
        if self.to_load or self.spoiled_from is not None or in_place < self.chunks.num_tokens:
            return 0
        if not decodes_too:
            done = self.handled >= self.chunks.chunking.covered(int(self.request.num_prompt_tokens))
            return None if done else 0
        missing = self.handled + self.chunks.chunking.chunk_size - in_place
        return max(0, -(-missing // most_tokens) - 1)

    def move(self, index: ChunkIndex, span: TokenRange, blocks: Sequence[int], block_size: int) -> Move:
        """The order to move `span` into or out of `blocks`."""
        whole = -(-span.num_tokens // self.chunks.chunking.chunk_size)
        keys = [packed(own[:whole]) for own in self.chunks.keys(index, span.num_tokens) if own]
        ids = self.chunks.ids(span.num_tokens)
        return Move(ids, self.chunks.salts, _block_row(blocks, block_size, span), span.first, span.end, keys)

    def _may_be_missing(self, chunk: int, is_kept: bool) -> bool:
        """Whether a chunk is to be stored, unless its rank finds it in host memory then.

        Args:
            is_kept: whether it is in every rank's host memory, as far as is known.
        """
        tier = self.found.tier_of(chunk)
        if tier is None:
            return not is_kept
        if tier != HOST:
            return False
        # What was found in host memory and is computed nevertheless was behind a gap: it is the first to go,
        # and may go before the scheduler hears of it.
        is_computed = chunk * self.chunks.chunking.chunk_size >= self._begun_with
        return is_computed or not is_kept

    def _set_back(self, computed: int) -> None:
        """Compute again from `computed` on: what was found from there on could not be loaded."""
        chunk = computed // self.chunks.chunking.chunk_size
        self.handled = chunk * self.chunks.chunking.chunk_size
        self.found.forget_from(chunk)


def _block_row(blocks: Sequence[int], block_size: int, span: TokenRange) -> Int64s:
    """`blocks`, int64; NULL_BLOCK for those that `span` does not touch: a long prompt has many."""
    first, end = span.first // block_size, min(-(-span.end // block_size), len(blocks))
    row = np.full(end, NULL_BLOCK, np.int64)
    row[first:end] = blocks[first:end]
    return row
