"""What the host does before the first copy of a store and of a load: not more for more chunks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hybrid.rig import Toy, full, local, window
from properties.test_host_work import called_within

from lwkv.hybrid import HybridSteps, Load, Store
from lwkv.kinds import Kind
from lwkv.platforms import Platform
from lwkv.platforms.cpu import CPU

Make = Callable[..., Toy]
CHUNK = 8
MODELS: dict[str, list[Kind]] = {
    "full attention and a window": [full(), window(7)],
    "two windows": [full(), window(19), window(5)],
    "chunked local attention": [full(8), local(16, 8)],
}
FEW, MANY = 8, 32
ONCE = 4
"""Calls where pages begin in another slab, and for a table of a size that was not made before."""
MOST_EVICTING = 14
"""Calls for a chunk of full attention that goes, and what is beside it."""


@pytest.fixture
def platform() -> CPU:
    """Whatever the tests run on: what is counted is the same on all."""
    return CPU()


@pytest.fixture(params=MODELS)
def kinds(request: pytest.FixtureRequest) -> list[Kind]:
    return MODELS[request.param]


def tokens(number: int, chunks: int) -> list[int]:
    return list(range(1000 * number, 1000 * number + CHUNK * chunks))


def store(model: Toy, ids: list[int]) -> tuple[list[str], Store]:
    """Store a prompt that is new: what was called before its first copy, and the store."""
    request = model.start(ids)
    model.allocate(request, [0] * len(model.group_kinds), len(ids))
    order = Store(request.hashes, 0, len(ids), request.tables)
    steps = HybridSteps(model.engine)

    def work() -> None:
        steps.begin((), [order])
        steps.start_load_kv()
        for layer in range(2):
            for group in range(len(model.group_kinds)):
                steps.save_kv_layer(model.names(group)[layer])
        assert steps.wait_for_save().stored

    names = called_within(work, ("save_batch",))
    model.end(request)
    assert model.engine.flush(20.0)
    return names[: names.index("save_batch")], order


def load(model: Toy, order: Store) -> list[str]:
    """Load what was stored, into the same blocks: what was called before the first copy of pages."""
    pin = model.engine.pin(order.hashes, 0, order.end)
    assert pin is not None
    loads = [Load(order.hashes, 0, order.end, order.tables)]
    names = called_within(lambda: model.engine.load_now(loads), ("load_batch",))
    model.engine.unpin(pin)
    return names[: names.index("load_batch")]


def test_calls_before_the_first_copy_do_not_grow_with_the_chunks(
    toy: Make, kinds: list[Kind], platform: Platform
) -> None:
    model = toy(kinds, chunk_size=CHUNK)
    model.engine._pool.reserve(model.engine.max_pages * model.engine.page_stride)
    store(model, tokens(1, MANY))
    few, many = (store(model, tokens(number, chunks)) for number, chunks in ((2, FEW), (3, MANY)))
    few_loaded, many_loaded = load(model, few[1]), load(model, many[1])
    assert len(many[0]) - ONCE <= len(few[0]) <= 400
    assert len(many_loaded) - ONCE <= len(few_loaded) <= 150


def test_what_a_store_evicts_takes_few_calls(toy: Make, kinds: list[Kind], platform: Platform) -> None:
    pages = 2 * MANY * (2 * len(kinds))
    model = toy(kinds, chunk_size=CHUNK, pages=pages)
    for number in range(1, 8):
        store(model, tokens(number, MANY))
    evicted = model.engine.counts()["chunks_evicted"]
    few, many = (store(model, tokens(number, chunks)) for number, chunks in ((11, FEW), (12, MANY)))
    assert model.engine.counts()["chunks_evicted"] - evicted >= FEW + MANY
    assert len(many[0]) - len(few[0]) <= MOST_EVICTING * (MANY - FEW)
