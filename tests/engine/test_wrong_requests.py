"""Requests that are refused at the call, and those that are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine.rig import CHUNK, prompt, store
from oracle import Oracle, require_rest, run_slots

from lwkv.engine import Request
from lwkv.errors import LayoutError, RequestError

WRONG_REQUESTS: dict[str, tuple[dict[str, Any], str]] = {
    "text as tokens": ({"tokens": "abcdefgh"}, "got str"),
    "fractions as tokens": ({"tokens": torch.zeros(8)}, "float32"),
    "tokens in two dimensions": ({"tokens": np.zeros((2, 4), int)}, "shape"),
    "a slot too few": ({"slot_mapping": run_slots(0, 7)}, "8 tokens"),
    "a slot too high": ({"slot_mapping": run_slots(121, 8)}, "slot 128 is out of range: slots are 0 to 127"),
    "a slot below none": ({"slot_mapping": [-2, *range(7)]}, "slot -2"),
    "a slot twice": ({"slot_mapping": [0, 1, 2, 3, 4, 5, 6, 3]}, "slot 3 is given to two tokens"),
    "slots that are no whole numbers": ({"slot_mapping": torch.arange(8.0)}, "whole numbers"),
    "no slots": ({"slot_mapping": None}, "whole numbers"),
    "a mask too long": ({"mask": [True] * 9}, "8 tokens"),
    "a mask of numbers": ({"mask": [1] * 8}, "must be bool"),
    "a mask with a hole": ({"mask": [True, False] * 4}, "leading part"),
    "a text as salts": ({"salts": "lora"}, "list or tuple"),
    "a number as salt": ({"salts": [1]}, "list or tuple"),
}


@pytest.mark.parametrize("name", WRONG_REQUESTS)
def test_a_wrong_request_is_refused_at_the_call_and_leaves_nothing(oracle: Oracle, name: str) -> None:
    wrong, text = WRONG_REQUESTS[name]
    arguments: dict[str, Any] = {"tokens": prompt(1, 8), "slot_mapping": run_slots(0, 8)} | wrong
    with oracle.engine(CHUNK) as engine:
        for call in (engine.retrieve_layer, engine.store_layer):
            with pytest.raises(RequestError, match=text):
                call(**arguments)
        with pytest.raises(RequestError, match=text):
            engine.retrieve_batch([Request(prompt(2, 8), run_slots(8, 8)), Request(**arguments)])
        require_rest(engine)
        oracle.check()


def test_requests_of_one_batch_may_not_load_into_one_slot(oracle: Oracle) -> None:
    requests = [Request(prompt(1, 8), run_slots(0, 8)), Request(prompt(2, 8), run_slots(7, 8))]
    with oracle.engine(CHUNK) as engine:
        with pytest.raises(RequestError, match="slot 7 is given to two tokens"):
            engine.retrieve_batch(requests)
        require_rest(engine)


def test_slots_and_masks_may_be_device_tensors(oracle: Oracle, device: torch.device) -> None:
    with oracle.engine(CHUNK) as engine:
        store(oracle, engine, prompt(1, 8), run_slots(0, 8))
        slots = torch.arange(64, 72, device=device)
        mask = torch.tensor([False] * 3 + [True] * 5, device=device)
        loaded = engine.retrieve(torch.tensor(prompt(1, 8), device=device), mask, slot_mapping=slots)
        assert loaded.device.type == "cpu"
        assert torch.equal(loaded, mask.cpu())
        oracle.expect(prompt(1, 8), run_slots(64, 8), loaded)
        oracle.check()


def test_other_caches_than_the_registered_ones_are_refused(oracle: Oracle) -> None:
    with oracle.engine(CHUNK) as engine:
        arguments: Any = {"tokens": prompt(1, 8), "slot_mapping": run_slots(0, 8)}
        others = {name: t.clone() for name, t in oracle.kvcaches.items()}
        with pytest.raises(LayoutError, match="make an engine for each"):
            engine.retrieve_layer(**arguments, kvcaches=others)
        assert not engine.retrieve(**arguments, kvcaches=oracle.kvcaches).any()
