"""In which tiers the chunks of a prompt are, of each kind of caches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lwkv.integrations.vllm.scheduler.lookup.index import Below, farther
from lwkv.keys import ChunkKey
from lwkv.kinds import Kind, KindIndex
from lwkv.kinds.boundary import find_boundaries
from lwkv.storage.tier import HOST


class KindChunk(NamedTuple):
    """A chunk of a kind, and the tier where it is."""

    kind: int
    chunk: int
    tier: str


@dataclass(frozen=True)
class KindPlaces:
    """Where the chunks of one prompt were found.

    Attributes:
        hashes: of its chunks.
        tiers: by kind and chunk, the slowest tier that a rank has it in; None where some rank has it nowhere.
    """

    kinds: Sequence[Kind]
    chunk_size: int
    hashes: Sequence[bytes]
    tiers: Sequence[Sequence[str | None]]

    def boundaries(self, num_tokens: int, local: int) -> Sequence[int]:
        """All boundaries behind `local` at which the prompt can go on with what is in some tier."""
        present = [np.array([tier is not None for tier in own], bool) for own in self.tiers]
        found = find_boundaries(self.kinds, self.chunk_size, num_tokens, local, present)
        return [int(boundary) for boundary in found]

    def needed(self, boundary: int, local: int) -> Iterator[tuple[int, range]]:
        """By the number of a kind, the chunks that are needed to go on at a boundary."""
        for number, kind in enumerate(self.kinds):
            first, end = kind.first_needed(boundary, local), boundary // self.chunk_size
            if first < boundary:
                yield number, range(first // self.chunk_size, end)

    def below_host(self, boundary: int, local: int) -> Iterator[KindChunk]:
        """Those of them that are not in the host memory of every rank."""
        for number, chunks in self.needed(boundary, local):
            for chunk in chunks:
                tier = self.tiers[number][chunk]
                if tier is not None and tier != HOST:
                    yield KindChunk(number, chunk, tier)


@dataclass(frozen=True)
class RankPlaces:
    """What one rank has of a prompt in host memory, and its tiers below, to be asked for the rest.

    Attributes:
        namespaces: of its chunks, by kind.
        in_host: by kind and chunk.
    """

    below: Below
    namespaces: Mapping[int, str]
    in_host: Sequence[Sequence[bool]]

    def find(self, hashes: Sequence[bytes]) -> list[list[str | None]]:
        """By kind and chunk the nearest tier, or None. Waits for the tiers."""
        found: list[list[str | None]] = [[HOST if there else None for there in own] for own in self.in_host]
        missing = [
            (kind, chunk)
            for kind, own in enumerate(self.in_host)
            for chunk, there in enumerate(own)
            if not there
        ]
        keys = [ChunkKey(self.namespaces[kind], hashes[chunk]) for kind, chunk in missing]
        for (kind, chunk), tier in zip(missing, self.below.find(keys), strict=True):
            found[kind][chunk] = tier
        return found


def rank_places(
    index: KindIndex, rank: int, below: Below, namespaces: Mapping[int, str], hashes: Sequence[bytes]
) -> RankPlaces:
    """What a rank has, as it is known now. A kind that nobody keeps is taken for there: none is needed."""
    in_host = [
        [kind not in namespaces or index.is_kept(rank, kind, chunk) for chunk in hashes]
        for kind in range(index.num_kinds)
    ]
    return RankPlaces(below, namespaces, in_host)


def find_places(
    kinds: Sequence[Kind], chunk_size: int, hashes: Sequence[bytes], ranks: Sequence[RankPlaces]
) -> KindPlaces:
    """Ask the tiers of all ranks. Waits for them."""
    by_rank = [rank.find(hashes) for rank in ranks]
    tiers = [
        [farther(each) for each in zip(*(found[kind] for found in by_rank), strict=True)]
        for kind in range(len(kinds))
    ]
    return KindPlaces(kinds, chunk_size, hashes, tiers)
