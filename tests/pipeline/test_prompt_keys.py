"""Keys that are not made twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lwkv.keys import ChunkKey, chunk_keys
from lwkv.pipeline import prompt_keys
from lwkv.pipeline.prompt_keys import FEW_CHUNKS, NUM_PROMPTS, PromptKeys
from lwkv.transfer import CheckedRequest, Chunking


@pytest.fixture
def memo() -> PromptKeys:
    return PromptKeys("model", Chunking(3, partial=False))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What keys were made of, call by call."""
    calls: list[Any] = []
    monkeypatch.setattr(prompt_keys, "chunk_keys", lambda *of: calls.append(of) or chunk_keys(*of))
    return calls


def test_the_same_prompt_is_hashed_once(memo: PromptKeys, made: list[Any]) -> None:
    first = memo.keys(np.arange(7), ("lora",))
    assert memo.keys(np.arange(7), ("lora",)) == first == chunk_keys(range(7), 3, "model", ["lora"])
    assert len(made) == 1


def test_a_rest_that_fills_no_chunk_has_a_key_where_these_count() -> None:
    memo = PromptKeys("model", Chunking(3, partial=True))
    assert memo.keys(np.arange(7), ()) == chunk_keys(range(7), 3, "model", partial=True)


def test_another_token_length_or_salt_is_another_prompt(memo: PromptKeys, made: list[Any]) -> None:
    asked = [(np.arange(9), ()), (np.arange(6), ()), (np.arange(9)[::-1], ()), (np.arange(9), ("a",))]
    for ids, salts in asked * 2:
        assert memo.keys(ids, salts) == chunk_keys(ids, 3, "model", salts)
    assert len(made) == 4


def test_ids_that_change_afterwards_do_not_change_what_is_remembered(memo: PromptKeys) -> None:
    ids = np.arange(6)
    before = memo.keys(ids, ())
    ids[0] = 99
    assert memo.keys(ids, ()) == chunk_keys([99, 1, 2, 3, 4, 5], 3, "model") != before
    assert memo.keys(np.arange(6), ()) == before


def test_only_the_last_prompts_are_kept(memo: PromptKeys, made: list[Any]) -> None:
    for number in range(NUM_PROMPTS + 1):
        memo.keys(np.array([number, 1, 2]), ())
    memo.keys(np.array([NUM_PROMPTS, 1, 2]), ())
    assert len(made) == NUM_PROMPTS + 1
    memo.keys(np.array([0, 1, 2]), ())
    assert len(made) == NUM_PROMPTS + 2


def test_keys_that_were_made_elsewhere_are_not_made_again(memo: PromptKeys, made: list[Any]) -> None:
    keys = chunk_keys(range(6), 3, "model", ["lora"])
    memo.remember(np.arange(6), ("lora",), keys)
    assert memo.keys(np.arange(6), ("lora",)) == keys
    assert not made


def test_prompts_that_agree_here_and_there_are_told_apart(memo: PromptKeys) -> None:
    one, other = np.zeros(300, np.int64), np.zeros(300, np.int64)
    other[100] = 7
    for ids in (one, other, one):
        assert memo.keys(ids, ()) == chunk_keys(ids, 3, "model")


def test_the_first_key_alone_is_made_where_it_takes_a_while_to_make_all(
    memo: PromptKeys, made: list[Any]
) -> None:
    chunking = Chunking(3, partial=False)
    none = np.zeros(30, np.int64)

    def first_of(num_chunks: int, **more: Any) -> ChunkKey | None:
        counts = chunking.chunk_tokens(3 * num_chunks)
        ids = np.arange(3 * num_chunks)
        return memo.first_of(CheckedRequest(ids, none, 0, ("a",), 3, counts, **more))

    assert first_of(FEW_CHUNKS) is None
    assert made == []
    keys = chunk_keys(range(27), 3, "model", ["a"])
    assert first_of(FEW_CHUNKS + 1) == keys[0]
    assert first_of(FEW_CHUNKS + 1, keys=keys) is None
    memo.remember(np.arange(27), ("a",), keys)
    assert first_of(FEW_CHUNKS + 1) is None
    assert [len(of[0]) for of in made] == [3]
