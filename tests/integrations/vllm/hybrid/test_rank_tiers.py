"""What the ranks have below host memory, as the scheduler knows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lwkv.hybrid import KindPages
from lwkv.integrations.vllm.hybrid.kind_places import KindPlaces
from lwkv.integrations.vllm.hybrid.rank_tiers import RankTiers
from lwkv.integrations.vllm.hybrid.reports import HybridInfo
from lwkv.keys import HASH_BYTES, ChunkKey
from lwkv.kinds import Kind, KindIndex

CHUNK = 8
KINDS = (Kind("state", 8, 2, 8, ("bfloat16",)), Kind("full", 8, 1, 8, ("bfloat16",)))
HASHES = [bytes([number]) * HASH_BYTES for number in range(4)]


class Tiers:
    """Of a rank: has nothing, and notes what it is told."""

    def __init__(self) -> None:
        self.num_closed = 0
        self.followed: list[list[ChunkKey]] = []
        self.left_alone: list[Mapping[str, float]] = []

    def find(self, keys: Sequence[ChunkKey]) -> list[str | None]:
        return [None for _ in keys]

    def follow(self, keys: list[ChunkKey]) -> None:
        self.followed.append(keys)

    def leave_alone(self, unread: Mapping[str, float]) -> None:
        self.left_alone.append(unread)

    def close(self) -> None:
        self.num_closed += 1


class Ranks:
    """RankTiers, and the tiers that it has opened, in their order."""

    def __init__(self, *infos: HybridInfo) -> None:
        self.opened: list[Tiers] = []
        self.tiers = RankTiers(self._open)
        for each in infos:
            self.tiers.introduce(each)

    def _open(self, _: HybridInfo) -> Any:
        self.opened.append(Tiers())
        return self.opened[-1]


def info(rank: int, max_pages: int = 40, state_pages: int = 1) -> HybridInfo:
    pages = {
        0: KindPages(f"states of {rank}", [state_pages], is_full=False),
        1: KindPages(f"full of {rank}", [2, 2], is_full=True),
    }
    return HybridInfo(rank, "chain", CHUNK, pages, max_pages=max_pages)


def test_tiers_of_a_rank_that_has_changed_are_closed_and_others_opened() -> None:
    ranks = Ranks(info(0, 3), info(0, 3), info(0, 4))
    assert [each.num_closed for each in ranks.opened] == [1, 0]
    ranks.tiers.close()
    assert [each.num_closed for each in ranks.opened] == [1, 1]


def test_room_is_that_of_the_rank_with_the_least_and_a_chunk_takes_what_the_largest_takes() -> None:
    tiers = Ranks(info(0, max_pages=40), info(1, max_pages=30, state_pages=3)).tiers
    assert tiers.most_room == 15
    assert [tiers.pages(kind) for kind in (0, 1)] == [3, 4]
    assert tiers.room([(0, range(2, 3)), (1, range(3))]) == 3 + 3 * 4


def test_a_usual_chunk_is_one_of_full_attention() -> None:
    tiers = Ranks(info(0)).tiers
    assert [tiers.size(kind) for kind in (0, 1)] == [0.25, 1]


def test_keys_are_those_of_each_rank_in_their_order() -> None:
    tiers = Ranks(info(1), info(0)).tiers
    assert [[key.namespace for key in own] for own in tiers.keys(1, HASHES[:1])] == [
        ["full of 0"],
        ["full of 1"],
    ]


def test_tiers_follow_full_attention_up_to_the_last_chunk_that_is_below_host_memory() -> None:
    ranks = Ranks(info(0))
    places = KindPlaces(KINDS, CHUNK, HASHES, [[None, "disk", None, "disk"], ["host", "disk", "host", None]])
    ranks.tiers.follow(places)
    assert ranks.opened[0].followed == [[ChunkKey("full of 0", each) for each in HASHES[:2]]]


def test_a_tier_that_a_rank_does_not_read_is_left_alone_and_unknown_ranks_have_none() -> None:
    ranks = Ranks(info(0))
    for rank in (0, 1):
        ranks.tiers.leave_alone(rank, {"disk": 1.0})
    assert ranks.opened[0].left_alone == [{"disk": 1.0}]


def test_what_a_rank_has_in_host_memory_is_there_when_it_is_asked_for() -> None:
    ranks, index = Ranks(info(0), info(1)), KindIndex(KINDS, CHUNK, 2)
    for rank in (0, 1):
        index.introduce(rank)
    index.kept(1, 0, HASHES[:1])
    found = [each.find(HASHES[:2]) for each in ranks.tiers.places(index, HASHES[:2])]
    assert found == [[[None, None], [None, None]], [["host", None], [None, None]]]
