"""Saves without an engine around them: kernels, copies and events alone, queued in several ways."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import numpy as np
import torch

from lwkv.benchmarks.measuring.measured_engine import MeasuredEngine
from lwkv.connectors.transfer_plan import page_shape
from lwkv.kernels import Rows, StagedLayers
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.platforms import CopyBatch, Event, Int64s, Stream
from lwkv.pool.page_copies import PageCopies
from lwkv.transfer import Transfer


@dataclass(frozen=True)
class Way:
    """One way of queueing a save of all layers.

    Attributes:
        buffers: staging buffers that take turns.
        layers: so many in one buffer, with one copy.
        scattered: no two pages are neighbours in host memory: as many runs as pages.
        kernels: whether anything is gathered, or coded, before the copies.
        copy_streams: streams that the copies are divided among, in turn; 0 for that of the kernels.
    """

    name: str
    buffers: int = 2
    layers: int = 1
    scattered: bool = False
    kernels: bool = True
    copy_streams: int = 1


WAYS = (
    Way("copies alone, a run a layer", kernels=False),
    Way("copies alone, a run a page", kernels=False, scattered=True),
    Way("two buffers, a run a layer"),
    Way("two buffers, a run a page", scattered=True),
    Way("four buffers", buffers=4),
    Way("two layers a buffer", layers=2),
    Way("two copy streams, four buffers", buffers=4, copy_streams=2),
    Way("one stream for both", copy_streams=0),
)


class BareSave:
    """Saves the source slots of a bed, all layers, into pages of its pool."""

    def __init__(self, bed: MeasuredEngine, way: Way) -> None:
        self._platform, self._device, self._way = bed.platform, bed.device, way
        saver = bed.engine.connector.saver
        self._plans, self._layers = saver._plans, saver._layers
        self._kernels = bed.engine.connector.kernels
        self._storage, self._pool = bed.engine.parts().storage, bed.engine._pool
        self._num_chunks = bed.num_tokens // bed.shape.chunk_size
        self._kernel_stream = self._platform.new_stream(self._device)
        own = [self._platform.new_stream(self._device) for _ in range(way.copy_streams)]
        self._copy_streams: list[Stream] = own or [self._kernel_stream]
        self._rows = self._rows_of(bed)
        self._page_bytes = self._plans.codec.page_bytes(self._layers[0])
        self._memory = [self._new_memory() for _ in range(way.buffers)]
        self._raw = self._new_memory()
        self.num_bytes = len(self._layers) * self._num_chunks * self._page_bytes
        self._platform.synchronize_device(self._device)

    def measure(self, repeats: int) -> list[float]:
        """Milliseconds from the first call until the device is idle, once for each repeat."""
        pages = self._pages()
        batches = list(self._batches(pages))
        try:
            return [self._save(batches) for _ in range(repeats + 1)][1:]
        finally:
            self._pool.release(pages.ravel())

    def _save(self, batches: Sequence[CopyBatch]) -> float:
        buffers = cycle([self._new_buffer(memory) for memory in self._memory])
        streams, steps = cycle(self._copy_streams), self._way.layers
        start = time.perf_counter()
        parts = [self._layers[i : i + steps] for i in range(0, len(self._layers), steps)]
        for layers, batch in zip(parts, batches, strict=True):
            memory, filled, emptied, was_used = next(buffers)
            copies = next(streams)
            if was_used:
                self._platform.wait_event(self._kernel_stream, emptied)
            was_used.append(True)
            if self._way.kernels:
                self._fill(layers, memory)
            self._platform.record(filled, self._kernel_stream)
            self._platform.wait_event(copies, filled)
            self._platform.save_batch(memory, batch, copies)
            self._platform.record(emptied, copies)
        self._platform.synchronize_device(self._device)
        return (time.perf_counter() - start) * 1e3

    def _fill(self, layers: Sequence[PagedLayer], memory: torch.Tensor) -> None:
        coder, paged = self._plans.codec.coder(self._layers[0]), self._plans.paged_coder
        if coder is None:
            self._launch(self._kernels.takes_handles, self._gather(layers, memory))
        elif paged is not None:
            work = partial(paged.encode, layers, self._rows.slots, memory, self._num_chunks)
            self._launch(paged.takes_handles, work)
        else:
            self._launch(self._kernels.takes_handles, self._gather(layers, self._raw))
            work = partial(coder.encode, self._raw, memory, len(layers) * self._num_chunks)
            self._launch(coder.takes_handles, work)

    def _gather(self, layers: Sequence[PagedLayer], memory: torch.Tensor) -> Callable[..., object]:
        layer_bytes = self._num_chunks * self._plans.slice_shape.shared_page_bytes
        staged = StagedLayers(layers, memory, layer_bytes, self._rows)
        return partial(self._kernels.move_layers, False, staged)

    def _launch(self, takes_handles: bool, work: Callable[..., object]) -> None:
        handle = self._platform.launch_handle(self._kernel_stream) if takes_handles else None
        if handle is None:
            self._platform.launch(self._kernel_stream, work)
        else:
            work(handle=handle)

    def _pages(self) -> Int64s:
        """Of all layers, int64 (layers, chunks)."""
        count = len(self._layers) * self._num_chunks
        pages = self._storage.allocate(count)
        if pages is None:
            raise RuntimeError(f"the pool has no {count} free pages")
        pages = pages.reshape(-1, self._num_chunks)
        return pages[:, ::-1] if self._way.scattered else pages

    def _batches(self, pages: Int64s) -> Iterator[CopyBatch]:
        sizes = np.full(self._num_chunks, self._page_bytes)
        copies = PageCopies(self._pool.slabs, pages, sizes, self._page_bytes)
        for first in range(0, len(pages), self._way.layers):
            yield copies.batch(first, min(first + self._way.layers, len(pages)))

    def _rows_of(self, bed: MeasuredEngine) -> Rows:
        """The rows of the source slots, whose pages lie in a buffer one behind the other."""
        transfer = Transfer(np.full(self._num_chunks, bed.shape.chunk_size), bed.source)
        numbers, _ = transfer.rows(page_shape(self._layers[0], bed.shape.chunk_size), self._num_chunks)
        return Rows(*torch.from_numpy(numbers).to(self._device).unbind())

    def _new_memory(self) -> torch.Tensor:
        page_bytes = max(self._page_bytes, self._plans.slice_shape.shared_page_bytes)
        nbytes = self._way.layers * self._num_chunks * page_bytes
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)

    def _new_buffer(self, memory: torch.Tensor) -> tuple[torch.Tensor, Event, Event, list[bool]]:
        return memory, self._platform.new_event(), self._platform.new_event(), []


def measure_ways(
    bed: MeasuredEngine, ways: Sequence[Way], repeats: int
) -> Iterator[tuple[Way, int, list[float]]]:
    """Each way with the bytes that it copies and its times."""
    for way in ways:
        save = BareSave(bed, way)
        yield way, save.num_bytes, save.measure(repeats)
