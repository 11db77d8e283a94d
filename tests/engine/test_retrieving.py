"""What is retrieved: which tokens, into which slots, and by several requests at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine.rig import CHUNK, LAYERS, MOST_TOKENS, prompt, store
from oracle import Oracle, require_rest, run_slots

from lwkv.platforms import Platform


@pytest.mark.parametrize(
    "settings",
    [{"use_layerwise": False}, {}, {"enable_blending": True}],
    ids=["bulk", "layer by layer", "buffer"],
)
def test_what_was_stored_comes_back_into_other_slots(oracle: Oracle, settings: dict[str, Any]) -> None:
    tokens, into = prompt(1), run_slots(64, MOST_TOKENS, backwards=True)
    with oracle.engine(CHUNK, **settings) as engine:
        store(oracle, engine, tokens, run_slots(0, MOST_TOKENS))
        assert engine.lookup(tokens) == 24
        mask = engine.retrieve(tokens, slot_mapping=into)
        assert mask.tolist() == [True] * 24 + [False] * 3
        oracle.expect(tokens, into, mask)
        oracle.check()
        require_rest(engine)


def test_a_batch_of_no_requests_takes_as_many_steps(oracle: Oracle) -> None:
    with oracle.engine(CHUNK) as engine:
        assert list(engine.retrieve_batch([])) == [[], *[None] * LAYERS, []]
        assert list(engine.store_batch([])) == [None] * (LAYERS + 1)
        require_rest(engine)


def test_tokens_may_come_in_any_container(oracle: Oracle) -> None:
    with oracle.engine(CHUNK) as engine:
        store(oracle, engine, prompt(1, 8), run_slots(0, 8))
        ids = prompt(1, 8)
        for tokens in (tuple(ids), np.array(ids, np.int32), torch.tensor(ids), torch.tensor(ids).int()):
            assert engine.retrieve(tokens, slot_mapping=torch.arange(64, 72)).all()
            oracle.expect(ids, run_slots(64, 8))
        oracle.check()


def test_another_salt_is_another_prompt(oracle: Oracle) -> None:
    with oracle.engine(CHUNK) as engine:
        store(oracle, engine, prompt(1, 8), run_slots(0, 8))
        assert engine.lookup(prompt(1, 8), salts=["lora"]) == 0
        assert not engine.retrieve(prompt(1, 8), slot_mapping=run_slots(8, 8), salts=("lora",)).any()
        oracle.check()
        require_rest(engine)


def test_tokens_without_a_slot_are_neither_promised_nor_loaded(oracle: Oracle) -> None:
    tokens, into = prompt(1, 16), run_slots(64, 16)
    into[3] = into[4] = into[11] = -1
    with oracle.engine(CHUNK) as engine:
        store(oracle, engine, tokens, run_slots(0, 16))
        promised, *_, mask = engine.retrieve_layer(tokens, slot_mapping=into)
        assert promised == 13
        assert mask.tolist() == [slot != -1 for slot in into]
        oracle.expect(tokens, into, mask)
        oracle.check()


@pytest.mark.parametrize("buffers", [2, 3, 4, 7])
@pytest.mark.parametrize("taken", range(LAYERS + 2))
def test_retrievals_may_take_their_steps_in_turn(oracle: Oracle, taken: int, buffers: int) -> None:
    lengths, slots = (8, 24, 16), [run_slots(first, 24) for first in (32, 64, 96)]
    with oracle.engine(CHUNK, staging_buffers=buffers) as engine:
        for i, length in enumerate(lengths):
            store(oracle, engine, prompt(i, length), run_slots(0, length))
        retrievals = [
            engine.retrieve_layer(prompt(i, length), slot_mapping=slots[i][:length])
            for i, length in enumerate(lengths)
        ]
        for _ in range(taken):
            next(retrievals[0])
        for steps in retrievals[1:]:
            next(steps)
        for steps in zip(*retrievals, strict=False):
            assert len(steps) == 3
        for i, length in enumerate(lengths):
            assert all(step is None or torch.is_tensor(step) for step in retrievals[i])
            oracle.expect(prompt(i, length), slots[i][:length])
        oracle.check()
        require_rest(engine)


def test_two_engines_in_one_process_keep_apart(platform: Platform, device: torch.device) -> None:
    one, other = Oracle(platform, device), Oracle(platform, device)
    with one.engine(CHUNK) as first, other.engine(CHUNK) as second:
        store(one, first, prompt(1, 16), run_slots(0, 16))
        store(other, second, prompt(2, 16), run_slots(16, 16))
        assert (first.lookup(prompt(2, 16)), second.lookup(prompt(1, 16))) == (0, 0)
        assert first.retrieve(prompt(1, 16), slot_mapping=run_slots(32, 16)).all()
        assert second.retrieve(prompt(2, 16), slot_mapping=run_slots(32, 16)).all()
        one.expect(prompt(1, 16), run_slots(32, 16))
        other.expect(prompt(2, 16), run_slots(32, 16))
        one.check()
        other.check()
