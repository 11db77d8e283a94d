from __future__ import annotations

from collections.abc import Mapping, Sequence

from lwkv.integrations.vllm.hybrid.kind_places import KindChunk, find_places, rank_places
from lwkv.keys import ChunkKey
from lwkv.kinds import Kind, KindIndex
from lwkv.storage.tier import HOST

KINDS = Kind("full", 4, 1, 64), Kind("window", 4, 1, 64, span=6)
CHUNK = 8
HASHES = [bytes([number]) * 16 for number in range(4)]
NAMES = {0: "full", 1: "window"}


class Tiers:
    """Lower tiers with these chunks of each kind."""

    def __init__(self, has: Mapping[str, Sequence[int]]) -> None:
        self.has = {ChunkKey(name, HASHES[chunk]) for name, chunks in has.items() for chunk in chunks}
        self.asked = 0

    def find(self, keys: Sequence[ChunkKey]) -> Sequence[str | None]:
        self.asked += len(keys)
        return ["disk" if key in self.has else None for key in keys]

    def leave_alone(self, tiers: Mapping[str, float]) -> None: ...

    def follow(self, prompt: Sequence[ChunkKey]) -> None: ...

    def close(self) -> None: ...


def test_a_boundary_needs_each_kind_of_every_rank_in_any_tier() -> None:
    index = KindIndex(KINDS, CHUNK, 2)
    below = [Tiers({"full": range(4), "window": [1, 3]}), Tiers({"full": [2, 3], "window": [1, 3]})]
    for rank in range(2):
        index.introduce(rank)
    index.kept(1, 0, HASHES[:2])
    index.kept(0, 1, [HASHES[1]])
    ranks = [rank_places(index, rank, below[rank], NAMES, HASHES) for rank in range(2)]
    places = find_places(KINDS, CHUNK, HASHES, ranks)
    assert below[0].asked == 4 + 3
    assert below[1].asked == 2 + 4
    assert places.tiers == [["disk"] * 4, [None, "disk", None, "disk"]]
    assert places.boundaries(33, 0) == [16, 32]
    assert places.boundaries(32, 0) == [16], "the last token is computed"
    assert dict(places.needed(32, 12)) == {0: range(1, 4), 1: range(3, 4)}
    assert [*places.below_host(32, 16)] == [
        KindChunk(0, 2, "disk"),
        KindChunk(0, 3, "disk"),
        KindChunk(1, 3, "disk"),
    ]


def test_what_is_in_the_host_memory_of_all_ranks_is_not_below() -> None:
    index = KindIndex(KINDS, CHUNK, 1)
    index.introduce(0)
    index.kept(0, 0, HASHES)
    index.kept(0, 1, HASHES)
    places = find_places(KINDS, CHUNK, HASHES, [rank_places(index, 0, Tiers({}), NAMES, HASHES)])
    assert places.tiers == [[HOST] * 4] * 2
    assert not [*places.below_host(32, 0)]
