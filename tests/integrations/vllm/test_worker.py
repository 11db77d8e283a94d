from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from integrations.vllm.scripted import BLOCK, CHUNK, RankOfModel

from lwkv import key_memo
from lwkv.integrations.vllm.orders import Move, StepOrders
from lwkv.keys import ChunkKey, chunk_keys


def move(keys: list[list[ChunkKey]]) -> Move:
    tokens = np.arange(2 * CHUNK)
    return Move(tokens, ("salt",), np.arange(1, 1 + len(tokens) // BLOCK), 0, len(tokens), keys)


def test_keys_that_come_with_the_orders_are_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = RankOfModel(0, 1, 16, 8, {})
    keys = chunk_keys(range(2 * CHUNK), CHUNK, rank.engine.namespace, ["salt"])
    monkeypatch.setattr(key_memo, "chunk_keys", None)
    rank.worker.begin(StepOrders(1, 0, [], [move([keys])]))
    assert rank.engine.keys(range(2 * CHUNK), ["salt"]) == keys
    rank.worker.close()


def test_keys_of_another_namespace_or_number_are_not_taken_over() -> None:
    rank = RankOfModel(0, 1, 16, 8, {})
    keys = chunk_keys(range(2 * CHUNK), CHUNK, rank.engine.namespace, ["salt"])
    for wrong in ([key._replace(namespace="other") for key in keys], keys[:1], []):
        rank.worker.begin(StepOrders(1, 0, [], [replace(move([]), keys=[wrong])]))
        assert rank.engine.keys(range(2 * CHUNK), ["salt"]) == keys
    rank.worker.close()
