"""One request as the scheduler's half follows it from step to step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from lwkv.integrations.vllm.orders import NULL_BLOCK, Move, packed
from lwkv.integrations.vllm.scheduler.lookup.costs import Choice
from lwkv.integrations.vllm.scheduler.lookup.index import ChunkIndex, RankKeys, leading
from lwkv.integrations.vllm.scheduler.prompt import salts_of, token_ids
from lwkv.platforms.protocol import Int64s
from lwkv.storage.tier import HOST
from lwkv.transfer import Chunking

Aside: TypeAlias = "Callable[[Callable[[], list[str | None]]], Future[list[str | None]]]"

ASK_AGAIN_S = 1.0
"""Seconds after which a waiting request's chunks are looked for again where there was no news of any."""


class Span(NamedTuple):
    """Tokens [first, end) are moved; their keys stand for the first `num_tokens`."""

    first: int
    end: int
    num_tokens: int


@dataclass(slots=True, eq=False)
class RequestState:
    """A request and how far its chunks are taken care of.

    Attributes:
        request: vLLM's own, which grows as tokens are generated.
        blocks: vLLM's blocks of it, as of the last step that it was in.
        to_load: tokens that its next step loads.
        cared_for: leading tokens whose chunks are cached or were ordered to be stored.
        sound: leading tokens of which no rank can have computed garbage.
        spoiled_from: tokens from here are garbage, or were computed on some; None for no such.
        choice: how much of what was found last is loaded; None where that was not weighed.
        tested_after: additions to the stale blocks when this request was compared with them last.
    """

    request: Any
    salts: tuple[str, ...]
    chunking: Chunking
    blocks: list[int] = field(default_factory=list)
    to_load: int = 0
    cared_for: int = 0
    sound: int = 0
    spoiled_from: int | None = None
    choice: Choice | None = None
    tested_after: int = 0
    _ids: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    _num_read: int = 0
    _keys: RankKeys = field(default_factory=list)
    _keyed: int = 0
    _computed: int = 0
    _found: Sequence[str | None] = ()
    _num_local: int = 0
    _found_for: int | None = None
    _found_at: float = 0.0
    _found_after: int = 0
    _names: frozenset[bytes] = frozenset()
    _asked: tuple[int, int, Future[list[str | None]]] | None = None

    @classmethod
    def follow(cls, request: Any, chunking: Chunking, epoch: str) -> RequestState:
        return cls(request, salts_of(request, epoch), chunking)

    def keys(self, index: ChunkIndex, num_tokens: int) -> RankKeys:
        """For each rank the keys of all chunks of the first `num_tokens` tokens, and maybe of more.

        Tokens are read, and chunks hashed, once: a new chunk costs its own tokens. The list is not the
        caller's to keep.
        """
        covered, size = self.chunking.covered(num_tokens), self.chunking.chunk_size
        # The key of a rest stands for just its tokens.
        has_them = self._keyed == covered if self.chunking.partial else self._keyed >= covered
        if not (has_them and self._keys):
            self._read(covered)
            full = min(self._keyed, covered) // size
            kept = self._keys if full * size == self._keyed else [own[:full] for own in self._keys]
            self._keys = index.more_keys(kept, self._ids[full * size : covered], self.salts)
            self._keyed = covered if self._keys else 0
        return self._keys

    def hit(self, index: ChunkIndex, block_size: int, num_local: int) -> int:
        """Tokens behind the first `num_local`, which vLLM has itself, that can be loaded.

        Whole blocks, and never up to the last token: one must be computed.
        """
        num_tokens, size = int(self.request.num_tokens), self.chunking.chunk_size
        self._look_up(index, num_tokens)
        self._num_local = num_local
        # Chunks in front are not loaded, and need not be there.
        first = num_local // size
        return self.usable(first + min(leading(self._found, first), index.most_chunks), block_size)

    def look_up_aside(self, index: ChunkIndex, aside: Aside) -> bool:
        """Find out which chunks are cached, and wait for no tier; whether `hit` is known by now.

        Args:
            aside: runs the look-up on another thread.
        """
        num_tokens = int(self.request.num_tokens)
        if self._asked is None:
            if not self._has_to_look_up(index, num_tokens):
                return True
            keys = self.keys(index, num_tokens)
            if not index.asks_lower_tiers(keys):
                return True
            # The lists may grow meanwhile.
            keys = [list(own) for own in keys]
            self._asked = num_tokens, index.changes, aside(partial(index.found, keys))
        asked_for, changes, answer = self._asked
        if not answer.done():
            return False
        self._asked = None
        self._take_over([] if answer.cancelled() else answer.result(), index, asked_for, changes)
        # There may be news since, and more tokens.
        return not self._has_to_look_up(index, num_tokens)

    def hit_in_host(self, block_size: int) -> int:
        """As `hit` has found it last, but only what is in the host memory of every rank."""
        first = self._num_local // self.chunking.chunk_size
        in_host = [tier if tier == HOST else None for tier in self._found]
        return self.usable(first + leading(in_host, first), block_size)

    def usable(self, num_chunks: int, block_size: int) -> int:
        """Tokens that can be loaded, behind vLLM's own, where the first `num_chunks` chunks are there."""
        num_tokens, cached = int(self.request.num_tokens), num_chunks * self.chunking.chunk_size
        usable = min(cached, self.chunking.covered(num_tokens), num_tokens - 1)
        return max(0, usable - usable % block_size - self._num_local)

    def chunks_of(self, num_loaded: int) -> range:
        """The chunks of the `num_loaded` tokens that `hit` has found last."""
        size, end = self.chunking.chunk_size, self._num_local + num_loaded
        return range(self._num_local // size, -(-end // size))

    def are_in_host(self, chunks: range) -> bool:
        """Whether these chunks, which were found, are in the host memory of every rank."""
        return all(tier == HOST for tier in self.tiers_of(chunks))

    def tiers_of(self, chunks: range) -> Sequence[str]:
        """The tiers of these chunks, which were found."""
        return [tier for tier in self._found[chunks.start : chunks.stop] if tier is not None]

    @property
    def num_local(self) -> int:
        """Tokens that vLLM had itself when `hit` was asked last."""
        return self._num_local

    def forget_lower_tiers(self, num_loaded: int) -> None:
        """Take chunks behind the `num_loaded` tokens promised last for not cached, but for host memory."""
        first = (self._num_local + num_loaded) // self.chunking.chunk_size
        behind = [tier if tier == HOST else None for tier in self._found[first:]]
        self._found = [*self._found[:first], *behind]

    def sources(self, num_loaded: int) -> dict[str, int]:
        """From which tier the `num_loaded` tokens come that were promised last: tokens by its name."""
        size, first, end = self.chunking.chunk_size, self._num_local, self._num_local + num_loaded
        tokens: Counter[str] = Counter()
        for chunk in range(first // size, -(-end // size)):
            tier = self._found[chunk] if self._is_found(chunk) else None
            if tier is not None:
                tokens[tier] += min(end, (chunk + 1) * size) - max(first, chunk * size)
        return tokens

    def begin(self, blocks: Sequence[int], num_loaded: int) -> None:
        """Begin to run in `blocks`, of which the next step loads `num_loaded` tokens."""
        self.blocks, self.to_load = list(blocks), num_loaded
        # What was ordered in an earlier run may be gone; what is cached now was looked up for this one.
        self.cared_for = self._computed = 0

    def load(self, computed: int) -> Span:
        """What a step has to load, that begins with `computed` tokens in place, the loaded ones included."""
        first, self.to_load = computed - self.to_load, 0
        # The key of the last chunk stands for all of its tokens.
        whole = computed + -computed % self.chunking.chunk_size
        return Span(first, computed, min(whole, self.chunking.covered(int(self.request.num_tokens))))

    def store(self, index: ChunkIndex, computed: int, in_place: int) -> list[Span]:
        """The chunks that are whole with `in_place` tokens and in no tier, each run of neighbours a span.

        Args:
            computed: tokens that were in place before the step. Where they are fewer than at the last step,
                the request has to compute anew, and what was ordered of it may never have been stored.
        """
        size = self.chunking.chunk_size
        if in_place < self.request.num_prompt_tokens:
            in_place -= in_place % size
        end = self.chunking.covered(in_place)
        if computed < max(self._computed, self.cared_for):
            self._set_back(computed)
        self._computed = computed
        begin, self.cared_for = self.cared_for, max(end, self.cared_for)
        if end <= begin:
            return []
        keys = self.keys(index, end)
        chunks = range(begin // size, -(-end // size))
        missing = [chunk for chunk in chunks if not (self._is_found(chunk) or index.has(keys, chunk))]
        firsts = [chunk for chunk in missing if chunk - 1 not in missing]
        ends = [min(end, size * (chunk + 1)) for chunk in missing if chunk + 1 not in missing]
        return [Span(size * first, last, last) for first, last in zip(firsts, ends, strict=True)]

    def store_rest(self, index: ChunkIndex, in_place: int) -> list[Span]:
        """As `store`, when the request has ended with `in_place` tokens in place."""
        return self.store(index, max(self._computed, self.cared_for), in_place)

    def has_rest(self, in_place: int) -> bool:
        """Whether chunks of the first `in_place` tokens are neither cached nor ordered to be stored."""
        return self.spoiled_from is None and self.chunking.covered(in_place) > self.cared_for

    def is_settled(self, computed: int, in_place: int) -> bool:
        """Whether a step from `computed` to `in_place` tokens has nothing to load or to store anew."""
        done = min(self.cared_for, computed)
        return not self.to_load and self.spoiled_from is None and done >= self.chunking.covered(in_place)

    def steps_asleep(self, in_place: int, decodes_too: bool, most_tokens: int) -> int | None:
        """For how many steps after one with `in_place` tokens there is nothing to do; None for all others.

        Args:
            decodes_too: whether generated tokens are stored.
            most_tokens: that a request gets in a step where it only decodes.
        """
        if self.to_load or self.spoiled_from is not None or in_place < int(self.request.num_tokens):
            return 0
        if not decodes_too:
            done = self.cared_for >= self.chunking.covered(int(self.request.num_prompt_tokens))
            return None if done else 0
        missing = self.cared_for + self.chunking.chunk_size - in_place
        return max(0, -(-missing // most_tokens) - 1)

    def move(self, index: ChunkIndex, span: Span, blocks: Sequence[int], block_size: int) -> Move:
        """The order to move `span` into or out of `blocks`."""
        whole = -(-span.num_tokens // self.chunking.chunk_size)
        keys = [packed(own[:whole]) for own in self.keys(index, span.num_tokens) if own]
        ids = self._read(span.num_tokens)
        return Move(ids, self.salts, _block_row(blocks, block_size, span), span.first, span.end, keys)

    def _look_up(self, index: ChunkIndex, num_tokens: int) -> None:
        if self._has_to_look_up(index, num_tokens):
            self._take_over(index.found(self.keys(index, num_tokens)), index, num_tokens, index.changes)

    def _has_to_look_up(self, index: ChunkIndex, num_tokens: int) -> bool:
        """Whether the last answer does not count any more. While a request waits, vLLM asks every step."""
        is_same = self._found_for == num_tokens and index.clock() - self._found_at < ASK_AGAIN_S
        if not is_same or index.has_news(self._names, self._found_after):
            return True
        self._found_after = index.changes
        return False

    def _take_over(
        self, found: Sequence[str | None], index: ChunkIndex, num_tokens: int, changes: int
    ) -> None:
        """Take over which chunks of the first `num_tokens` tokens were found after so many changes."""
        self._found, self._found_after = found, changes
        self._found_for, self._found_at = num_tokens, index.clock()
        keys = self.keys(index, num_tokens)
        self._names = frozenset(key.hash for own in keys for key in own)

    def _is_found(self, chunk: int) -> bool:
        """Whether a chunk was cached, in any tier, when the request began to run."""
        return chunk < len(self._found) and self._found[chunk] is not None

    def _set_back(self, computed: int) -> None:
        """Compute again from `computed` on: what was found from there on could not be loaded."""
        chunk = computed // self.chunking.chunk_size
        self.cared_for, self._found = chunk * self.chunking.chunk_size, self._found[:chunk]

    def _read(self, num_tokens: int) -> Int64s:
        """The ids of the first `num_tokens` tokens; what was read before is not read again."""
        known = self._num_read
        if num_tokens > known:
            if num_tokens > len(self._ids):
                # What was given out stays as it is.
                grown = np.zeros(max(num_tokens, 2 * len(self._ids)), np.int64)
                grown[:known] = self._ids[:known]
                self._ids = grown
            self._ids[known:num_tokens] = token_ids(self.request, num_tokens, known)
            self._num_read = num_tokens
        return self._ids[:num_tokens]


def _block_row(blocks: Sequence[int], block_size: int, span: Span) -> Int64s:
    """`blocks`, int64; NULL_BLOCK for those that `span` does not touch: a long prompt has many."""
    first, end = span.first // block_size, min(-(-span.end // block_size), len(blocks))
    row = np.full(end, NULL_BLOCK, np.int64)
    row[first:end] = blocks[first:end]
    return row
