from __future__ import annotations

import numpy as np

from lwkv.integrations.vllm.orders import Move
from lwkv.integrations.vllm.reports import RankInfo, RankReport
from lwkv.integrations.vllm.scheduler.kv_events import KVEventLog, Removed, Stored
from lwkv.keys import chunk_keys

TOKENS = np.arange(11)
KEYS = chunk_keys(TOKENS, 4, "name", partial=True)
HASHES = [key.hash for key in KEYS]


def chronicle(lora: str | None = None, first: int = 0, end: int = 11) -> KVEventLog:
    found = KVEventLog(4)
    found.expect(Move(TOKENS[:end], (), np.zeros(0, np.int64), first, end), KEYS, lora)
    return found


def report(rank: int = 0, **changes: list[bytes]) -> RankReport:
    return RankReport(RankInfo(rank, "name"), 1, **changes)


def test_a_chunk_that_is_kept_is_reported_with_its_tokens_and_the_chunk_in_front() -> None:
    found = chronicle("style")
    found.learn(report(kept=HASHES))
    assert list(found.take()) == [
        Stored(HASHES[0], None, (0, 1, 2, 3), "style"),
        Stored(HASHES[1], HASHES[0], (4, 5, 6, 7), "style"),
        Stored(HASHES[2], HASHES[1], (8, 9, 10), "style"),
    ]
    assert list(found.take()) == []


def test_a_chunk_is_reported_once_until_it_goes() -> None:
    found = chronicle()
    for _ in range(2):
        found.learn(report(kept=HASHES[:1]))
    found.learn(report(dropped=HASHES[:1]))
    found.learn(report(dropped=HASHES[:1]))
    assert [type(event) for event in found.take()] == [Stored, Removed]


def test_chunks_outside_the_move_and_of_other_ranks_are_not_told() -> None:
    found = chronicle(first=4, end=8)
    found.learn(report(rank=1, kept=HASHES))
    assert list(found.take()) == []
    found.learn(report(kept=HASHES))
    assert [event.hash for event in found.take()] == HASHES[1:2]
