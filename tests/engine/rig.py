"""What the tests of the engine share: prompts, a device that fails, and what holds at rest."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from oracle import MemoryTier, Oracle, run_slots

from lwkv.connectors.row_tables import RowTables
from lwkv.engine import CacheEngine

CHUNK = 8
LAYERS = 3
MOST_TOKENS = 27


def prompt(number: int, length: int = MOST_TOKENS) -> list[int]:
    return [1000 * number + i for i in range(length)]


def store(oracle: Oracle, engine: CacheEngine, tokens: list[int], slots: list[int]) -> None:
    """Store what the model computes, and wait until it is visible."""
    oracle.compute(tokens, slots)
    engine.store(tokens, slot_mapping=slots)
    assert engine.flush()
    oracle.zero(slots)


def store_in(oracle: Oracle, tier: MemoryTier, tokens: Sequence[list[int]]) -> None:
    """Leave the KV of several prompts in a lower tier only."""
    with oracle.engine(CHUNK, tiers=[tier]) as engine:
        for prompt_tokens in tokens:
            store(oracle, engine, prompt_tokens, run_slots(0, len(prompt_tokens)))


def take(steps: Generator[Any, None, None], number: int | None) -> list[Any]:
    """Take `number` steps and close, or all there are."""
    taken = []
    with closing(steps):
        while number is None or len(taken) < number:
            item = next(steps, "ended")
            if item == "ended":
                break
            taken.append(item)
    return taken


def chunk_of(engine: CacheEngine, tokens: list[int], number: int) -> Any:
    return engine._prompt_keys.keys(np.asarray(tokens), ())[number]


def require_closed(engine: CacheEngine) -> None:
    assert engine.flush()
    stats = engine.stats()
    assert (stats["pins"], stats["writes_in_flight"], stats["page_references"]) == (0, 0, 0)


@contextmanager
def failing_device(engine: CacheEngine, place: str | None) -> Iterator[None]:
    """Inside, the device fails at `place`, or has no memory, nor has the host any to page-lock."""
    connector: Any = engine.connector
    with pytest.MonkeyPatch.context() as monkeypatch:
        if place == "begin":
            monkeypatch.setattr(connector.loader, "begin_load", refuse(torch.OutOfMemoryError))
            monkeypatch.setattr(connector.saver, "begin_save", refuse(torch.OutOfMemoryError))
        elif place == "end":
            # Of a store whose end cannot be waited for nobody gets the pages: that is a test of its own.
            monkeypatch.setattr(connector.loader, "end_load", refuse(RuntimeError))
        elif place == "leave":
            monkeypatch.setattr(connector.loader, "leave_load", refuse(RuntimeError))
            monkeypatch.setattr(connector.saver, "leave_save", refuse(RuntimeError))
        elif place == "table":
            monkeypatch.setattr(RowTables, "send", take_table_and_fail)
        elif place == "pinned table":
            monkeypatch.setattr(RowTables, "new_table", refuse(MemoryError))
        elif place == "second layer":
            for half, name in ((connector.loader, "load_layer"), (connector.saver, "save_layers")):
                monkeypatch.setattr(half, name, refuse_second(getattr(half, name)))
        elif place is not None:
            layer = int(place.split()[-1])
            wait_layer = connector.loader.wait_layer
            monkeypatch.setattr(connector.loader, "wait_layer", refuse_layer(wait_layer, layer))
        yield


def take_table_and_fail(uploads: RowTables, values: npt.NDArray[Any]) -> None:
    uploads.new_table(values.nbytes)
    raise torch.OutOfMemoryError("no memory left, says the test")


def refuse_layer(call: Callable[[Any, int], None], refused: int) -> Callable[[Any, int], None]:
    def wait_layer(load: Any, layer: int) -> None:
        if layer == refused:
            raise RuntimeError(f"layer {layer} cannot be waited for, says the test")
        call(load, layer)

    return wait_layer


def refuse(error: type[Exception]) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise error("no memory left, says the test")

    return call


def refuse_second(call: Callable[..., Any]) -> Callable[..., Any]:
    calls = []

    def refuse(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory for the second layer, says the test")
        return call(*arguments)

    return refuse
