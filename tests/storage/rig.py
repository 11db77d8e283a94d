"""A storage manager over a small pool, with chunks that tell by their bytes which they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from storage.faulty_tier import LONG_S, FaultyTier

from lwkv.keys import ChunkKey
from lwkv.platforms.cpu import CPU
from lwkv.pool.host_pool import HostPool
from lwkv.storage import Hold, LayerPages, StorageManager, Write
from lwkv.storage.host_tier import HostChunks
from lwkv.telemetry.counters import Counters

NUM_LAYERS = 3
PAGE_BYTES = 5


def key(number: int) -> ChunkKey:
    return ChunkKey("model", number.to_bytes(16, "little"))


def keys(*numbers: int) -> list[ChunkKey]:
    return [key(number) for number in numbers]


def value(number: int, layer: int) -> int:
    """What every byte of a page is."""
    return (number * NUM_LAYERS + layer) % 251 + 1


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """A manager of chunks named by numbers; its clock stands still unless it is given another.

    `memory` is a pool and what knows its chunks, None for a pool of its own; `settings` are more of
    StorageManager's.
    """

    def __init__(
        self,
        num_chunks: int = 8,
        tiers: Sequence[FaultyTier] = (),
        timeout_s: float = LONG_S,
        clock: Callable[[], float] | None = None,
        memory: tuple[Any, HostChunks | None] | None = None,
        **settings: bool,
    ) -> None:
        own = HostPool(CPU(), PAGE_BYTES, num_chunks * NUM_LAYERS * 4096, 4 * 4096), None
        self.pool, host = memory or own
        self.tiers = tiers
        self.counters = Counters()
        self.clock = Clock()
        self.manager = StorageManager(
            self.pool, NUM_LAYERS, tiers, timeout_s, self.counters, clock or self.clock, host=host, **settings
        )
        self.host = self.manager.host

    def begin(self, *numbers: int) -> Write | None:
        """Begin a write and fill its pages."""
        write = self.manager.begin_write(keys(*numbers))
        if write is not None:
            for i, position in enumerate(write.positions.tolist()):
                for layer in range(NUM_LAYERS):
                    page = self.pool.page(int(write.pages[layer, i]))
                    page.fill_(value(numbers[position], layer))
        return write

    def store(self, *numbers: int) -> None:
        """Store chunks, down to the last tier that takes them."""
        self.commit(*numbers)
        self.settle()

    def settle(self) -> None:
        """Have all written that the lower tiers take, and wait for it."""
        self.manager.lower.settle()
        assert self.manager.lower.wait_idle(LONG_S)

    def commit(self, *numbers: int) -> None:
        """Store chunks; the lower tiers may still be busy with them."""
        write = self.begin(*numbers)
        assert write is not None
        write.commit()

    def put_below(self, tier: FaultyTier, *numbers: int) -> None:
        """Have `tier` keep chunks that the host tier does not have."""
        others = [other for other in self.tiers if other is not tier]
        self.store(*numbers)
        for number in numbers:
            for layer_key in key(number).split_layers(NUM_LAYERS):
                for other in others:
                    del other.pages[layer_key]
        self.forget(*numbers)

    def forget(self, *numbers: int) -> None:
        """Have the host tier evict these chunks."""
        for chunk_key in keys(*numbers):
            self.host._order.evict_first(chunk_key)
        assert self.host.evict(len(numbers) * NUM_LAYERS)

    def lookup(self, *numbers: int) -> int:
        return self.manager.lookup(keys(*numbers))

    def hold(self, *numbers: int) -> Hold:
        return self.manager.hold(keys(*numbers))

    def load(self, hold: Hold) -> list[list[int | None]]:
        """For each layer, the value of each chunk's page; None for what did not arrive."""
        futures = self.manager.layerwise_batched_get(hold, range(NUM_LAYERS))
        return [self.values_of(future) for future in futures]

    def values_of(self, layer: Future[LayerPages]) -> list[int | None]:
        return [self._value(page) for page in layer.result(LONG_S).pages.tolist()]

    def require_rest(self) -> None:
        """Nothing is held but what is cached."""
        self.settle()
        assert (self.host.pins, self.manager.writes_in_flight) == (0, 0)
        assert self.pool.pages_in_use == self.pool.references == len(self.host) * NUM_LAYERS
        cached = [chunk.pages for chunk in self.host._chunks.values()]
        assert len(np.unique(cached)) == self.pool.references

    def end(self) -> None:
        """Let everything go on, and see that nothing is left behind."""
        for tier in self.tiers:
            tier.end_faults()
        self.require_rest()
        self.manager.close(LONG_S)
        assert (self.pool.pages_in_use, self.pool.references) == (0, 0)

    def _value(self, page: int) -> int | None:
        if page < 0:
            return None
        values = set(self.pool.page(page).tolist())
        assert len(values) == 1
        return int(values.pop())


def values(*numbers: int | None) -> list[list[int | None]]:
    """What `Rig.load` returns for chunks of these numbers, None for one that is missing in every layer."""
    return [
        [None if number is None else value(number, layer) for number in numbers]
        for layer in range(NUM_LAYERS)
    ]
