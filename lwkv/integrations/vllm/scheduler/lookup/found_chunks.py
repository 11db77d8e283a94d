"""Which chunks of one request were found in some tier, and how many of their tokens can be loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from lwkv.integrations.vllm.scheduler.lookup.index import ChunkIndex, leading
from lwkv.integrations.vllm.scheduler.request_chunks import RequestChunks
from lwkv.storage.tier import HOST

Aside: TypeAlias = "Callable[[Callable[[], list[str | None]]], Future[list[str | None]]]"

ASK_AGAIN_S = 1.0
"""Seconds after which a waiting request's chunks are looked for again where there was no news of any."""


@dataclass(slots=True, eq=False)
class FoundChunks:
    """What the last look-up has found; while a request waits, vLLM asks in every step.

    Attributes:
        num_local: tokens that vLLM had itself when `hit` was asked last.
    """

    chunks: RequestChunks
    num_local: int = 0
    _tiers: Sequence[str | None] = ()
    _found_for: int | None = None
    _found_at: float = 0.0
    _found_after: int = 0
    _names: frozenset[bytes] = frozenset()
    _asked: tuple[int, int, Future[list[str | None]]] | None = None

    def hit(self, index: ChunkIndex, block_size: int, num_local: int) -> int:
        """Tokens behind the first `num_local`, which vLLM has itself, that can be loaded.

        Whole blocks, and never up to the last token: one must be computed.
        """
        num_tokens, size = self.chunks.num_tokens, self.chunks.chunking.chunk_size
        self._look_up(index, num_tokens)
        self.num_local = num_local
        # Chunks in front are not loaded, and need not be there.
        first = num_local // size
        return self.usable(first + min(leading(self._tiers, first), index.most_chunks), block_size)

    def look_up_aside(self, index: ChunkIndex, aside: Aside) -> bool:
        """Find out which chunks are cached, and wait for no tier; whether `hit` is known by now.

        Args:
            aside: runs the look-up on another thread.
        """
        num_tokens = self.chunks.num_tokens
        if self._asked is None:
            if not self._has_to_look_up(index, num_tokens):
                return True
            keys = self.chunks.keys(index, num_tokens)
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

    @property
    def is_asking(self) -> bool:
        """Whether a look-up is under way."""
        return self._asked is not None and not self._asked[2].done()

    def look_into_host(self, index: ChunkIndex) -> None:
        """Take over what is in host memory now, and ask no tier: what was found below stays as it is.

        A look-up that is under way is not waited for any more.
        """
        self._asked = None
        num_tokens = self.chunks.num_tokens
        if not self._has_to_look_up(index, num_tokens):
            return
        there = index.in_host(self.chunks.keys(index, num_tokens))
        below = [None if tier == HOST else tier for tier in self._tiers[: len(there)]]
        below += [None] * (len(there) - len(below))
        found = [host or tier for host, tier in zip(there, below, strict=True)]
        self._take_over(found, index, num_tokens, index.changes)

    def hit_in_host(self, block_size: int) -> int:
        """As `hit` has found it last, but only what is in the host memory of every rank."""
        first = self.num_local // self.chunks.chunking.chunk_size
        in_host = [tier if tier == HOST else None for tier in self._tiers]
        return self.usable(first + leading(in_host, first), block_size)

    def usable(self, num_chunks: int, block_size: int) -> int:
        """Tokens that can be loaded, behind vLLM's own, where the first `num_chunks` chunks are there."""
        num_tokens, cached = self.chunks.num_tokens, num_chunks * self.chunks.chunking.chunk_size
        usable = min(cached, self.chunks.chunking.covered(num_tokens), num_tokens - 1)
        return max(0, usable - usable % block_size - self.num_local)

    def chunks_of(self, num_loaded: int) -> range:
        """The chunks of the `num_loaded` tokens that `hit` has found last."""
        size, end = self.chunks.chunking.chunk_size, self.num_local + num_loaded
        return range(self.num_local // size, -(-end // size))

    def are_in_host(self, chunks: range) -> bool:
        """Whether these chunks, which were found, are in the host memory of every rank."""
        return all(tier == HOST for tier in self.tiers_of(chunks))

    def tiers_of(self, chunks: range) -> Sequence[str]:
        """The tiers of these chunks, which were found."""
        return [tier for tier in self._tiers[chunks.start : chunks.stop] if tier is not None]

    def forget_lower_tiers(self, num_loaded: int) -> None:
        """Take chunks behind the `num_loaded` tokens promised last for not cached, but for host memory."""
        first = (self.num_local + num_loaded) // self.chunks.chunking.chunk_size
        behind = [tier if tier == HOST else None for tier in self._tiers[first:]]
        self._tiers = [*self._tiers[:first], *behind]

    def sources(self, num_loaded: int) -> dict[str, int]:
        """From which tier the `num_loaded` tokens come that were promised last: tokens by its name."""
        size, first, end = self.chunks.chunking.chunk_size, self.num_local, self.num_local + num_loaded
        tokens: Counter[str] = Counter()
        for chunk in range(first // size, -(-end // size)):
            tier = self.tier_of(chunk)
            if tier is not None:
                tokens[tier] += min(end, (chunk + 1) * size) - max(first, chunk * size)
        return tokens

    def tier_of(self, chunk: int) -> str | None:
        """Where a chunk was cached when the request began to run; None for in no tier."""
        return self._tiers[chunk] if chunk < len(self._tiers) else None

    def forget_from(self, chunk: int) -> None:
        """Take this chunk, and those behind it, for not cached."""
        self._tiers = self._tiers[:chunk]

    def _look_up(self, index: ChunkIndex, num_tokens: int) -> None:
        if self._has_to_look_up(index, num_tokens):
            keys = self.chunks.keys(index, num_tokens)
            self._take_over(index.found(keys), index, num_tokens, index.changes)

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
        self._tiers, self._found_after = found, changes
        self._found_for, self._found_at = num_tokens, index.clock()
        keys = self.chunks.keys(index, num_tokens)
        self._names = frozenset(key.hash for own in keys for key in own)
