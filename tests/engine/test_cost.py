"""What retrieving and storing cost: events, and calls for each layer."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from engine.rig import CHUNK, LAYERS, failing_device, prompt, store, take
from oracle import Dims, Oracle, require_rest, run_slots

import lwkv.pipeline.tier_pages
from lwkv.platforms import Platform, open_platform


def test_events_are_used_again_and_none_is_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU only: freed, a torch.cuda.Event leaves weak references dangling (pytorch PR 183403)."""
    platform = open_platform("cpu")
    oracle = Oracle(platform, platform.current_device(), dims=Dims(blocks=32))
    events: weakref.WeakSet[Any] = weakref.WeakSet()
    new_event = platform.new_event

    def counted(*arguments: Any, **settings: Any) -> Any:
        event = new_event(*arguments, **settings)
        events.add(event)
        return event

    monkeypatch.setattr(platform, "new_event", counted)
    with oracle.engine(CHUNK) as engine:
        alive = []
        for number in range(4):
            store(oracle, engine, prompt(number, 16), run_slots(0, 16))
            for taken in (None, *range(LAYERS + 2)):
                take(engine.retrieve_layer(prompt(number, 16), slot_mapping=run_slots(64, 16)), taken)
            with failing_device(engine, "wait for layer 1"):
                list(engine.retrieve_layer(prompt(number, 16), slot_mapping=run_slots(64, 16)))
            require_rest(engine)
            gc.collect()
            alive.append(len(events))
        assert alive == alive[:1] * 4
    del engine
    gc.collect()
    assert len(events) == 0


def calls_within(work: Callable[[], object]) -> Counter[str]:
    """How often `work` calls what, in lwkv's own code above the platform and from there, on this thread."""
    calls: Counter[str] = Counter()
    root = str(Path(lwkv.__file__).parent)

    def counts(frame: FrameType) -> bool:
        file = frame.f_code.co_filename
        return file.startswith(root) and "platforms" not in file

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and counts(frame):
            calls[frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name] += 1
        elif event == "c_call" and counts(frame):
            calls[getattr(argument, "__qualname__", str(argument))] += 1

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("storing", [False, True], ids=["retrieve", "store"])
def test_the_host_s_work_for_a_layer_is_the_same_for_any_number_of_chunks(
    platform: Platform, device: torch.device, storing: bool
) -> None:
    counts = []
    for num_chunks in (2, 12):
        oracle = Oracle(platform, device, dims=Dims(layers=6, blocks=64))
        tokens, slots = prompt(1, num_chunks * CHUNK), run_slots(0, num_chunks * CHUNK)
        with oracle.engine(CHUNK, 6 * 12, staging_bytes=1 << 20) as engine:
            if not storing:
                store(oracle, engine, tokens, slots)
            steps = (engine.store_layer if storing else engine.retrieve_layer)(tokens, slot_mapping=slots)
            for _ in range(4):
                next(steps)
            counts.append(calls_within(lambda steps=steps: next(steps)))
            steps.close()
    assert sum(counts[0].values()) > 5
    assert counts[0] == counts[1]
