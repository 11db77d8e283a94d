from __future__ import annotations

from lwkv.integrations.vllm.reports import RankInfo, RankReport
from lwkv.integrations.vllm.scheduler.lookup.index import ChunkIndex
from lwkv.integrations.vllm.scheduler.lookup.kept_chunks import KeptChunks
from lwkv.keys import ChunkKey


def keys(prompt: int, count: int = 3) -> list[ChunkKey]:
    return [ChunkKey("model", b"%d-%d" % (prompt, i)) for i in range(count)]


def test_of_more_chunks_than_have_room_those_heard_of_longest_ago_are_forgotten() -> None:
    kept = KeptChunks(3)
    kept.add([b"a", b"b"])
    kept.add([b"c"])
    kept.add([b"a"])
    kept.add([b"d"])
    assert [name in kept for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    kept.remove([b"a", b"a", b"e"])
    assert len(kept) == 2
    kept.clear()
    assert len(kept) == 0


def test_of_more_than_have_room_at_once_the_first_ones_stay() -> None:
    kept = KeptChunks(2)
    kept.add([b"a", b"b", b"c"])
    assert [name in kept for name in (b"a", b"b", b"c")] == [True, True, False]


def test_what_an_owner_had_of_many_prompts_is_not_remembered_for_ever() -> None:
    """What other engines have stored is evicted, and nobody says so."""
    index = ChunkIndex(1, 4)
    index.introduce(RankInfo(0, "model", most_chunks=8, host_name="a"))
    for prompt in range(100):
        index.learn_owner([keys(prompt)], [[True] * 3])
        assert index.prefix([keys(prompt)]) == 3
        assert len(index) <= 8


def test_what_a_rank_has_stored_of_others_chunks_is_not_remembered_for_ever_either() -> None:
    index, info = ChunkIndex(1, 4), RankInfo(0, "model", most_chunks=8, host_name="a")
    for prompt in range(100):
        index.learn(RankReport(info, 1, kept=[key.hash for key in keys(prompt)]))
        assert len(index) <= 8


def test_a_rank_with_memory_of_its_own_says_itself_what_goes() -> None:
    index, info = ChunkIndex(1, 4), RankInfo(0, "model", most_chunks=8)
    for prompt in range(10):
        index.learn(RankReport(info, 1, kept=[key.hash for key in keys(prompt)]))
    assert len(index) == 30
