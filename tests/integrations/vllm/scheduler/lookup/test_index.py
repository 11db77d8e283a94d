from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lwkv.integrations.vllm.reports import RankInfo, RankReport
from lwkv.integrations.vllm.scheduler.lookup.found_chunks import ASK_AGAIN_S
from lwkv.integrations.vllm.scheduler.lookup.index import ChunkIndex
from lwkv.integrations.vllm.scheduler.request_state import RequestState
from lwkv.keys import ChunkKey, chunk_keys
from lwkv.transfer import Chunking

CHUNK = 4
TOKENS = np.arange(8 * CHUNK)


class Shelf:
    """Lower tiers that have some chunks, and were asked for some."""

    def __init__(self, *keys: ChunkKey) -> None:
        self.keys = set(keys)
        self.asked: list[ChunkKey] = []
        self.followed: list[list[ChunkKey]] = []
        self.closed = False
        self.unread: dict[str, float] | None = None

    def find(self, keys: Sequence[ChunkKey]) -> list[str | None]:
        self.asked += keys
        return ["shelf" if key in self.keys else None for key in keys]

    def leave_alone(self, tiers: Mapping[str, float]) -> None:
        self.unread = dict(tiers)

    def follow(self, prompt: Sequence[ChunkKey]) -> None:
        self.followed.append(list(prompt))

    def close(self) -> None:
        self.closed = True


def info(rank: int) -> RankInfo:
    return RankInfo(rank, f"model-{rank}")


def hashes(rank: int, *chunks: int) -> list[bytes]:
    keys = chunk_keys(TOKENS, CHUNK, info(rank).namespace)
    return [keys[chunk].hash for chunk in chunks]


def make_index(num_ranks: int, *kept: Sequence[int]) -> ChunkIndex:
    index = ChunkIndex(num_ranks, CHUNK)
    for rank, chunks in enumerate(kept):
        index.learn(RankReport(info(rank), 1, kept=hashes(rank, *chunks)))
    return index


def test_nothing_is_there_before_every_rank_is_known() -> None:
    index = make_index(2, [0, 1, 2])
    assert index.keys(TOKENS, ()) == []
    assert index.prefix(index.keys(TOKENS, ())) == 0
    index.introduce(info(1))
    assert index.prefix(index.keys(TOKENS, ())) == 0
    index.learn(RankReport(info(1), 2, kept=hashes(1, 0, 1)))
    assert index.prefix(index.keys(TOKENS, ())) == 2


@given(st.lists(st.sets(st.integers(0, 7)), min_size=1, max_size=4))
def test_a_prefix_is_as_long_as_that_of_the_rank_with_the_least(kept: list[set[int]]) -> None:
    index = make_index(len(kept), *map(sorted, kept))
    keys = index.keys(TOKENS, ())
    everywhere = set.intersection(*kept)
    assert index.prefix(keys) == next(n for n in range(9) if n not in everywhere)
    assert [index.has(keys, chunk) for chunk in range(8)] == [chunk in everywhere for chunk in range(8)]
    assert len(index) == min(map(len, kept))


def test_salts_and_tokens_make_other_chunks() -> None:
    index = make_index(1, range(8))
    assert index.prefix(index.keys(TOKENS, ("salt", "s"))) == 0
    assert index.prefix(index.keys(np.where(np.arange(32) == 9, 99, TOKENS), ())) == 2


def test_what_went_or_could_not_be_loaded_is_not_there() -> None:
    index = make_index(1, range(8))
    keys = index.keys(TOKENS, ())
    index.learn(RankReport(info(0), 2, dropped=hashes(0, 6)))
    assert index.prefix(keys) == 6
    index.learn(RankReport(info(0), 3, kept=hashes(0, 4), failed=hashes(0, 4)))
    assert index.prefix(keys) == 4
    index.learn(RankReport(info(0), 4, kept=hashes(0, 4, 6)))
    assert index.prefix(keys) == 8
    index.clear()
    assert index.prefix(keys) == 0


def test_lower_tiers_are_asked_for_what_host_memory_lacks_unless_it_failed() -> None:
    keys = chunk_keys(TOKENS, CHUNK, info(0).namespace)
    shelf = Shelf(*keys[1:4])
    index = ChunkIndex(1, CHUNK, open_lower_tiers=lambda _: shelf)
    index.learn(RankReport(info(0), 1, kept=hashes(0, 0, 4)))
    assert index.prefix([keys]) == 5
    assert shelf.asked == [*keys[1:4], *keys[5:]]
    assert shelf.followed == [keys[:4]], "with those before them: a prompt is of use only from its start"
    index.learn(RankReport(info(0), 2, failed=hashes(0, 2)))
    shelf.asked.clear()
    assert index.prefix([keys]) == 2
    assert keys[2] not in shelf.asked
    index.close()
    assert shelf.closed


def test_no_more_is_promised_than_the_smallest_host_memory_of_a_rank_has_room_for() -> None:
    names = [info(rank).namespace for rank in range(2)]
    shelves = [Shelf(*chunk_keys(TOKENS, CHUNK, name)) for name in names]
    index = ChunkIndex(2, CHUNK, open_lower_tiers=lambda rank: shelves[rank.rank])
    for rank, room in enumerate([5, 3]):
        index.introduce(RankInfo(rank, names[rank], most_chunks=room))
    assert index.prefix(index.keys(TOKENS, ())) == 3
    assert index.found(index.keys(TOKENS, ())) == ["shelf"] * 8, "what is there is not stored again"


def test_tiers_that_a_rank_leaves_alone_are_reported_to_its_lookups_and_are_news() -> None:
    shelf = Shelf()
    index = ChunkIndex(1, CHUNK, open_lower_tiers=lambda _: shelf)
    index.learn(RankReport(info(0), 1))
    assert shelf.unread is None
    changes = index.changes
    for unread in ({"disk": 2.0}, {}):
        index.learn(RankReport(info(0), 2, unread=unread))
        assert shelf.unread == unread
    assert index.changes == changes + 2


def test_lower_tiers_are_opened_once_a_rank() -> None:
    opened: list[int] = []

    def open_lower_tiers(rank: RankInfo) -> Shelf:
        opened.append(rank.rank)
        return Shelf()

    index = ChunkIndex(2, CHUNK, open_lower_tiers=open_lower_tiers)
    for rank in (0, 1, 0, 1):
        index.introduce(info(rank))
    assert opened == [0, 1]


@pytest.mark.parametrize("rows", [[1, 1], [1, 16]])
def test_tokens_are_moved_together_as_the_coarsest_rank_must(rows: list[int]) -> None:
    index = ChunkIndex(2, CHUNK)
    for rank, tokens in enumerate(rows):
        index.introduce(RankInfo(rank, "name", tokens))
    assert index.tokens_per_row == max(rows)


def test_lower_tiers_are_asked_again_for_a_waiting_request_after_news_or_a_while() -> None:
    now = [0.0]
    shelf = Shelf(*chunk_keys(TOKENS, CHUNK, info(0).namespace)[:2])
    index = ChunkIndex(1, CHUNK, open_lower_tiers=lambda _: shelf, clock=lambda: now[0])
    index.introduce(info(0))
    request: Any = SimpleNamespace(all_token_ids=TOKENS.tolist(), num_tokens=len(TOKENS))
    tracked = RequestState.follow(request, Chunking(CHUNK, False, 1), "")
    for _ in range(3):
        assert tracked.found.hit(index, CHUNK, 0) == 2 * CHUNK
    assert len(shelf.asked) == 8
    index.learn(RankReport(info(0), 1))  # no news
    assert tracked.found.hit(index, CHUNK, 0) == 2 * CHUNK
    assert len(shelf.asked) == 8
    index.learn(RankReport(info(0), 2, failed=hashes(0, 1)))
    assert tracked.found.hit(index, CHUNK, 0) == CHUNK
    assert len(shelf.asked) == 8 + 7
    index.clear()
    shelf.keys.clear()
    assert tracked.found.hit(index, CHUNK, 0) == 0
    shelf.keys.update(chunk_keys(TOKENS, CHUNK, info(0).namespace)[:3])
    assert tracked.found.hit(index, CHUNK, 0) == 0
    now[0] += ASK_AGAIN_S
    assert tracked.found.hit(index, CHUNK, 0) == 3 * CHUNK


def test_several_texts_are_looked_up_with_one_question_and_are_followed_each() -> None:
    shelf = Shelf()
    index = ChunkIndex(1, CHUNK, open_lower_tiers=lambda _: shelf)
    index.introduce(info(0))
    one, other = (index.keys(TOKENS[:end], (name,)) for end, name in ((3 * CHUNK, "a"), (2 * CHUNK, "b")))
    shelf.keys = {one[0][1], other[0][0]}
    index.learn(RankReport(info(0), 1, kept=[one[0][0].hash]))
    assert index.found_in([one, other]) == [["host", "shelf", None], ["shelf", None]]
    assert shelf.asked == [*one[0][1:], *other[0]]
    assert shelf.followed == [one[0][:2], other[0][:1]]
    assert index.found_in([]) == []
    assert ChunkIndex(1, CHUNK).found_in([[], []]) == [[], []]
