"""A CPU platform that writes down who touches which memory, and finds what no recorded wait puts in order.

Every operation has a vector clock: how far each stream was when it may start at the earliest. Two operations
that touch the same byte, one of them writing, must have one clock that contains the other. The host has one
clock for all its threads. Memory is never given back, so that no two uses of it are mistaken for one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from oracle import Oracle
from torch import Tensor

from lwkv.codecs.lossless_form import LosslessForm
from lwkv.codecs.torch_lossless import TorchLossless
from lwkv.kernels import Rows, TorchKernels, Turn
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.platforms import CopyBatch
from lwkv.platforms.cpu import CPU

Clock = dict[int, int]
Spans = list[tuple[Any, Any]]  # starts and ends, addresses


@dataclass(eq=False)
class Operation:
    """One operation of a stream; `reads` and `writes` are int64 (2, n), starts and ends of address ranges."""

    name: str
    stream: int
    number: int
    clock: Clock
    reads: Spans = field(default_factory=list)
    writes: Spans = field(default_factory=list)

    def comes_before(self, other: Operation) -> bool:
        return other.clock.get(self.stream, 0) >= self.number


class Races(CPU):
    """See above. `find` tells the first pair of operations that nothing puts in order."""

    def __init__(self) -> None:
        super().__init__()
        self._clocks: dict[int, Clock] = {}
        self._events: dict[int, Clock] = {}
        self._host: Clock = {}
        self._operations: list[Operation] = []
        self._kept: list[Any] = []
        self._running = threading.local()
        self._mutex = threading.RLock()

    def find(self) -> str | None:
        operations = [operation for operation in self._operations if operation.reads or operation.writes]
        for i, later in enumerate(operations):
            for earlier in operations[:i]:
                if not earlier.comes_before(later) and _touch(earlier, later):
                    return f"nothing orders {later.name} behind {earlier.name}"
        return None

    def note(self, reads: Spans, writes: Spans) -> None:
        """Add to the operation that runs on this thread, if one does."""
        operation = getattr(self._running, "operation", None)
        if operation is not None:
            operation.reads += reads
            operation.writes += writes

    def keep(self, *memory: Any) -> None:
        self._kept += memory

    def launch(self, stream: Any, work: Callable[[], object]) -> None:
        operation = self._begin(stream, getattr(getattr(work, "func", work), "__qualname__", "work"))

        def run() -> None:
            self._running.operation = operation
            work()
            self._running.operation = None

        super().launch(stream, run)

    def load_batch(self, buffer: Tensor, batch: CopyBatch, stream: Any) -> None:
        operation = self._begin(stream, "the copy of a load")
        operation.reads.append(_spans(batch.host_addresses, batch.sizes))
        operation.writes.append(_spans(batch.device_offsets + buffer.data_ptr(), batch.sizes))
        super().load_batch(buffer, batch, stream)

    def save_batch(self, buffer: Tensor, batch: CopyBatch, stream: Any) -> None:
        operation = self._begin(stream, "the copy of a save")
        operation.writes.append(_spans(batch.host_addresses, batch.sizes))
        operation.reads.append(_spans(batch.device_offsets + buffer.data_ptr(), batch.sizes))
        super().save_batch(buffer, batch, stream)

    def copy_async(self, dst: Tensor, src: Tensor, stream: Any) -> None:
        operation = self._begin(stream, "the upload of a table")
        operation.reads.append(tensor_span(src))
        operation.writes.append(tensor_span(dst))
        self.keep(dst, src)
        super().copy_async(dst, src, stream)

    def record(self, event: Any, stream: Any) -> None:
        with self._mutex:
            self._events[id(event)] = dict(self._clock(stream))
            self.keep(event)
        super().record(event, stream)

    def wait_event(self, stream: Any, event: Any) -> None:
        with self._mutex:
            _join(self._clock(stream), self._events[id(event)])
        super().wait_event(stream, event)

    def wait_stream(self, waiter: Any, other: Any) -> None:
        with self._mutex:
            _join(self._clock(waiter), self._clock(other))
        super().wait_stream(waiter, other)

    def synchronize_event(self, event: Any) -> None:
        with self._mutex:
            clock = dict(self._events[id(event)])
        super().synchronize_event(event)
        with self._mutex:
            _join(self._host, clock)

    def alloc_pinned(self, nbytes: int) -> Tensor:
        memory = super().alloc_pinned(nbytes)
        self.keep(memory)
        return memory

    def _begin(self, stream: Any, name: str) -> Operation:
        with self._mutex:
            clock = self._clock(stream)
            _join(clock, self._host)
            clock[id(stream)] = clock.get(id(stream), 0) + 1
            operation = Operation(name, id(stream), clock[id(stream)], dict(clock))
            self._operations.append(operation)
            return operation

    def _clock(self, stream: Any) -> Clock:
        self.keep(stream)
        return self._clocks.setdefault(id(stream), {})


class WatchedKernels(TorchKernels):
    """The torch kernels, telling what they touch, tables included."""

    def __init__(self, races: Races) -> None:
        self._races = races

    def scatter(self, layer: PagedLayer, staging: Tensor, rows: Rows, turn: Turn | None = None) -> None:
        staged, cached = self._spans(layer, staging, rows)
        turns = [table for table in (turn or ())[:3] if table.numel()]
        self._races.keep(*turns)
        self._races.note(reads=[*staged, *_tables(rows), *map(tensor_span, turns)], writes=cached)
        super().scatter(layer, staging, rows, turn)

    def gather(self, layer: PagedLayer, staging: Tensor, rows: Rows) -> None:
        staged, cached = self._spans(layer, staging, rows)
        self._races.note(reads=[*cached, *_tables(rows)], writes=staged)
        super().gather(layer, staging, rows)

    def _spans(self, layer: PagedLayer, staging: Tensor, rows: Rows) -> tuple[Spans, Spans]:
        self._races.keep(layer.k, layer.v, staging)
        size, start = layer.row_bytes, staging.data_ptr()
        numbers = [rows.k_rows, *([] if layer.v is None else [rows.v_rows])]
        staged = [_spans(start + number.numpy() * size, size) for number in numbers]
        views = [layer.k, *([] if layer.v is None else [layer.v])]
        return staged, [row_spans(view, rows.slots.numpy()) for view in views]


class WatchedCoder(TorchLossless):
    """What codes pages in torch, telling what it touches; without `shrinks` no page can be coded."""

    def __init__(self, races: Races, shrinks: bool, form: LosslessForm) -> None:
        super().__init__(form)
        self._races, self._shrinks = races, shrinks

    def encode(self, raw: Tensor, coded: Tensor, num_pages: int, handle: int | None = None) -> None:
        raw_span, coded_span = self._spans(raw, coded, num_pages)
        self._races.note(reads=raw_span, writes=coded_span)
        super().encode(raw, coded, num_pages)

    def decode(self, coded: Tensor, raw: Tensor, num_pages: int, handle: int | None = None) -> None:
        raw_span, coded_span = self._spans(raw, coded, num_pages)
        self._races.note(reads=coded_span, writes=raw_span)
        super().decode(coded, raw, num_pages)
        if not self._shrinks:
            raw[: num_pages * self.raw_bytes] = 0

    def whole(self, heads: Any) -> Any:
        return super().whole(heads) & self._shrinks

    def fits(self, headers: Any) -> Any:
        return super().fits(headers) & self._shrinks

    def _spans(self, raw: Tensor, coded: Tensor, num_pages: int) -> tuple[Spans, Spans]:
        self._races.keep(raw, coded)
        sizes = num_pages * self.raw_bytes, num_pages * self.page_bytes
        raw_span, coded_span = (
            [_spans(np.array([memory.data_ptr()]), size)]
            for memory, size in zip((raw, coded), sizes, strict=True)
        )
        return raw_span, coded_span


class WatchedOracle(Oracle):
    """An oracle whose model tells what it touches."""

    def _put(self, views: Any, slots: Any, rows: Tensor) -> None:
        moved = np.asarray(slots, np.int64)
        moved = moved[moved != -1]
        self._note(writes=[row_spans(view, moved) for view in views[1:] if view is not None])
        super()._put(views, slots, rows)

    def _rows_of(self, view: Tensor, slots: Any) -> Tensor:
        self._note(reads=[row_spans(view, np.asarray(slots, np.int64))])
        return super()._rows_of(view, slots)

    def _note(self, reads: Spans | None = None, writes: Spans | None = None) -> None:
        assert isinstance(self.platform, Races)
        self.platform.note(reads or [], writes or [])


def row_spans(view: Tensor, slots: Any) -> tuple[Any, Any]:
    """Where rows of a paged view, [blocks, tokens, heads, width], lie; their heads lie side by side."""
    block, offset = np.divmod(slots, view.shape[1])
    elements = block * view.stride(0) + offset * view.stride(1)
    return _spans(view.data_ptr() + elements * view.element_size(), view[0, 0].numel() * view.element_size())


def tensor_span(t: Tensor) -> tuple[Any, Any]:
    return _spans(np.array([t.data_ptr()]), t.nbytes)


def _tables(rows: Rows) -> Spans:
    return [tensor_span(table) for table in (rows.slots, rows.k_rows, rows.v_rows) if table.numel()]


def _spans(starts: Any, sizes: Any) -> tuple[Any, Any]:
    return starts, starts + sizes


def _join(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


def _touch(one: Operation, other: Operation) -> bool:
    return (
        _overlap(one.writes, other.writes)
        or _overlap(one.writes, other.reads)
        or _overlap(one.reads, other.writes)
    )


def _overlap(one: Spans, other: Spans) -> bool:
    return any(
        bool(((a[:, None] < d[None]) & (c[None] < b[:, None])).any()) for a, b in one for c, d in other
    )
