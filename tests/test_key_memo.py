"""Keys that are not made twice."""

from __future__ import annotations

import numpy as np

from lwkv.key_memo import NUM_PROMPTS, KeyMemo
from lwkv.keys import ChunkKey, chunk_keys
from lwkv.platforms.protocol import Int64s


class Maker:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: Int64s, salts: tuple[str, ...]) -> list[ChunkKey]:
        self.calls += 1
        return chunk_keys(ids, 3, "model", salts)


def test_the_same_prompt_is_hashed_once() -> None:
    maker = Maker()
    memo = KeyMemo(maker)
    first = memo.keys(np.arange(7), ("lora",))
    assert memo.keys(np.arange(7), ("lora",)) == first == chunk_keys(range(7), 3, "model", ["lora"])
    assert maker.calls == 1


def test_another_token_length_or_salt_is_another_prompt() -> None:
    maker = Maker()
    memo = KeyMemo(maker)
    asked = [(np.arange(7), ()), (np.arange(6), ()), (np.arange(7)[::-1], ()), (np.arange(7), ("a",))]
    for ids, salts in asked * 2:
        assert memo.keys(ids, salts) == chunk_keys(ids, 3, "model", salts)
    assert maker.calls == 4


def test_ids_that_change_afterwards_do_not_change_what_is_remembered() -> None:
    memo, ids = KeyMemo(Maker()), np.arange(6)
    before = memo.keys(ids, ())
    ids[0] = 99
    assert memo.keys(ids, ()) == chunk_keys([99, 1, 2, 3, 4, 5], 3, "model") != before
    assert memo.keys(np.arange(6), ()) == before


def test_only_the_last_prompts_are_kept() -> None:
    maker = Maker()
    memo = KeyMemo(maker)
    for number in range(NUM_PROMPTS + 1):
        memo.keys(np.array([number, 1, 2]), ())
    memo.keys(np.array([NUM_PROMPTS, 1, 2]), ())
    assert maker.calls == NUM_PROMPTS + 1
    memo.keys(np.array([0, 1, 2]), ())
    assert maker.calls == NUM_PROMPTS + 2
