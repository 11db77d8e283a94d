"""Groups of one engine take turns with one set of streams and staging: as few copies as that allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hybrid.rig import Toy, full, local, state, window

from lwkv.hybrid import Load
from lwkv.request import KeyedSlots

Make = Callable[..., Toy]
MODELS = {
    "gemma": ([full(), window(19)], [1, 5], 8),
    "two windows and a state": ([full(4), window(10), window(5), state(8)], [2, 1, 1, 2], 16),
    "chunked local attention": ([full(8), local(32, 8)], [1, 3], 8),
}
LAYERS = 2  # of each group


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, toy: Make) -> Toy:
    return toy(*MODELS[request.param])


@contextmanager
def counted(toy: Toy) -> Iterator[Counter[str]]:
    """Batches and bytes of copies to and from staging, and tables that are sent."""
    platform, (first, *_) = toy.platform, toy.engine.engines
    found, lane = Counter[str](), first.connector.loader.lane
    real = platform.load_batch, platform.save_batch

    def load_batch(buffer: Any, batch: Any, stream: Any) -> None:
        if stream is lane.copies:
            found["loads"] += 1
            found["loaded bytes"] += int(batch.sizes.sum())
        else:
            found["tables"] += 1
        real[0](buffer, batch, stream)

    def save_batch(buffer: Any, batch: Any, stream: Any) -> None:
        found["saves"] += 1
        found["saved bytes"] += int(batch.sizes.sum())
        real[1](buffer, batch, stream)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "load_batch", load_batch)
        patch.setattr(platform, "save_batch", save_batch)
        yield found


def page_bytes(toy: Toy, wanted: list[list[KeyedSlots]]) -> int:
    """Of all layers of what each group moves."""
    return sum(
        LAYERS * len(keyed.keys) * engine.connector.page_bytes
        for engine, own in zip(toy.engine.engines, wanted, strict=True)
        for keyed in own
    )


def copies_of(moves: list[bool], toy: Toy) -> int:
    """Of the groups that move anything, whose bytes are few, each takes one copy.

    Pages that are no multiple of 16 bytes do not share a staging buffer: each layer takes a copy.
    """
    pages = [engine.connector.page_bytes for engine in toy.engine.engines]
    return sum(1 if size % 16 == 0 else LAYERS for size, moved in zip(pages, moves, strict=True) if moved)


def loads_of(toy: Toy, loads: list[Load]) -> list[list[KeyedSlots]]:
    return [[keyed for keyed in own if keyed is not None] for own in toy.engine.loads_of(loads)]


def test_all_groups_have_the_streams_and_the_staging_of_one(model: Toy) -> None:
    lanes = {id(engine.connector.loader.lane) for engine in model.engine.engines}
    lanes |= {id(engine.connector.saver.lane) for engine in model.engine.engines}
    assert len(lanes) == 2


@pytest.mark.parametrize("apart", [True, False], ids=["all at once", "by layers"])
def test_no_page_is_copied_twice_and_a_group_of_few_bytes_takes_one_copy(model: Toy, apart: bool) -> None:
    tokens = list(range(100, 177))
    model.ask(tokens)
    request, found = model.start(tokens), model.boundary(tokens)
    pin = model.engine.pin(request.hashes, 0, found)
    assert pin is not None
    load = model.load(request, found)
    wanted = loads_of(model, [load])
    with counted(model) as counts:
        if apart:
            assert model.engine.load_now([load]) == [True]
        else:
            model.run_step([(request, load)], [])
    assert counts["loaded bytes"] == page_bytes(model, wanted)
    assert counts["tables"] == sum(map(bool, wanted))
    assert counts["loads"] == copies_of([bool(own) for own in wanted], model)
    model.engine.unpin(pin)
    model.end(request)


def test_a_store_copies_each_new_page_once_and_a_group_takes_one_copy(model: Toy) -> None:
    tokens = list(range(100, 172))
    with counted(model) as counts:
        model.ask(tokens)
    in_use = model.engine.stats()["pages_in_use"]
    sizes = {engine.connector.page_bytes for engine in model.engine.engines}
    assert min(sizes) * in_use <= counts["saved bytes"] <= max(sizes) * in_use
    assert counts["tables"] == len(model.engine.groups)
    assert counts["saves"] == copies_of([True] * len(model.engine.engines), model)


@pytest.mark.parametrize("lane", ["loader", "saver"])
@pytest.mark.parametrize("stream", ["copies", "kernels"])
def test_bytes_are_right_whichever_stream_is_late(model: Toy, lane: str, stream: str) -> None:
    """Groups fill the same buffers in turn: what is read too early is another layer's."""
    late = getattr(getattr(model.engine.engines[0].connector, lane).lane, stream)
    late.late = True
    tokens = list(range(100, 177))
    model.ask(tokens, step=24)
    assert model.ask(tokens, step=24) == 76 // model.chunk * model.chunk
    model.ask([*tokens[:50], *range(40)], step=32)
