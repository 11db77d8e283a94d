"""What a scheduler knows of the chunks of each kind that every rank has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from lwkv.kinds.boundary import Flags, find_boundary
from lwkv.kinds.kind import Kind


class KindIndex:
    """Chunks of several kinds, by their hashes; one is there if every rank has it that keeps this kind.

    Nothing is there before all ranks have been introduced. Not thread-safe.

    Args:
        kinds: their numbers below are their positions here.
        chunk_size: tokens.
    """

    def __init__(self, kinds: Sequence[Kind], chunk_size: int, num_ranks: int) -> None:
        self._kinds = kinds
        self._chunk_size = chunk_size
        self._num_ranks = num_ranks
        self._ranks: dict[int, frozenset[int]] = {}
        self.clear()

    def introduce(self, rank: int, kinds: Iterable[int] | None = None) -> None:
        """Learn of a rank and which kinds it keeps, all by default: a pipeline's stage may lack some."""
        keeps = frozenset(range(len(self._kinds)) if kinds is None else kinds)
        if self._ranks.get(rank) != keeps:
            self._ranks[rank] = keeps
            self.clear()

    def kept(self, rank: int, kind: int, hashes: Iterable[bytes]) -> None:
        """Learn that a rank has chunks of a kind now."""
        own, counts = self._own[kind].setdefault(rank, set()), self._counts[kind]
        needed = self._holders(kind)
        for chunk in set(hashes) - own:
            own.add(chunk)
            counts[chunk] += 1
            if counts[chunk] == needed:
                self._everywhere[kind].add(chunk)

    def dropped(self, rank: int, kind: int, hashes: Iterable[bytes]) -> None:
        """Learn that a rank has chunks of a kind no more."""
        own, counts = self._own[kind].setdefault(rank, set()), self._counts[kind]
        for chunk in own.intersection(hashes):
            own.discard(chunk)
            self._everywhere[kind].discard(chunk)
            counts[chunk] -= 1
            if not counts[chunk]:
                del counts[chunk]

    def clear(self) -> None:
        """Forget all chunks, not the ranks."""
        self._own: list[dict[int, set[bytes]]] = [{} for _ in self._kinds]
        self._counts: list[Counter[bytes]] = [Counter() for _ in self._kinds]
        self._everywhere: list[set[bytes]] = [set() for _ in self._kinds]

    def boundary(self, hashes: Sequence[bytes], num_tokens: int, local: int = 0) -> int:
        """The largest boundary at which a prompt can go on, as `find_boundary`.

        Args:
            hashes: of the prompt's full chunks, in order. num_tokens: of the prompt.
        """
        present = [self._present(kind, hashes) for kind in range(len(self._kinds))]
        return find_boundary(self._kinds, self._chunk_size, num_tokens, local, present)

    def is_everywhere(self, kind: int, chunk: bytes) -> bool:
        """Whether every rank has a chunk of a kind."""
        return chunk in self._everywhere[kind]

    def is_kept(self, rank: int, kind: int, chunk: bytes) -> bool:
        """Whether a rank has a chunk of a kind."""
        return chunk in self._own[kind].get(rank, ())

    @property
    def num_kinds(self) -> int:
        return len(self._kinds)

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have been introduced."""
        return len(self._ranks) >= self._num_ranks

    def full_hit(self, hashes: Sequence[bytes], num_tokens: int, local: int = 0) -> int:
        """As `boundary`, for kinds of full attention alone; `local` if there is no such kind.

        Where it is larger, prompts part at a place at which no window or state is kept: keep one there.
        """
        numbers = [kind_number for kind_number, kind in enumerate(self._kinds) if kind.form == "full"]
        if not numbers:
            return local
        kinds = [self._kinds[kind_number] for kind_number in numbers]
        present = [self._present(kind_number, hashes) for kind_number in numbers]
        return find_boundary(kinds, self._chunk_size, num_tokens, local, present)

    def _holders(self, kind: int) -> int:
        return sum(kind in keeps for keeps in self._ranks.values())

    def _present(self, kind: int, hashes: Sequence[bytes]) -> Flags:
        if not self.is_complete:
            return np.zeros(0, bool)
        if not self._holders(kind):
            return np.ones(len(hashes), bool)
        return np.fromiter(map(self._everywhere[kind].__contains__, hashes), bool, len(hashes))
