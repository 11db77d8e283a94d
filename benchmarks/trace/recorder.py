"""Records one move: what the host queued when, and when the device did it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest.mock import patch

from lwkv import engine
from lwkv.benchmarks.measuring.measured_engine import MeasuredEngine
from lwkv.codecs import PageCheck
from lwkv.connectors.lane import Lane
from lwkv.connectors.saver import Saver
from lwkv.connectors.transfer_plan import TransferPlan
from lwkv.pipeline import prompt_keys
from lwkv.platforms import CopyBatch, Event, Stream
from lwkv.storage import StorageManager, Write
from lwkv.storage.host_tier import HostTier

KERNELS = ("move", "decode", "encode", "code_in_cache")
"""Methods of Lane that launch kernels; their names are those of the kernels here."""
HOST_CALLS: tuple[tuple[Any, str], ...] = (
    (engine, "check_loads"),
    (engine, "check_stores"),
    (prompt_keys, "chunk_keys"),
    (StorageManager, "hold"),
    (StorageManager, "begin_write"),
    (HostTier, "evict"),
    (Saver, "begin_save"),
    (TransferPlan, "slices"),
    (TransferPlan, "copy"),
    (Saver, "end_save"),
    (Saver, "whole_chunks"),
    (PageCheck, "fits"),
    (Write, "commit"),
)
"""What is timed on the host besides; calls lie within each other."""
Move = Callable[[], object]


@dataclass(frozen=True)
class Work:
    """One copy, or the kernels of one staging buffer. Times are in ms from the call of the move.

    Attributes:
        what: "copy", or the method of Lane that launched kernels.
        way: "load" or "save".
        num_bytes, runs: of a copy; 0 for kernels.
        asked, queued: when the host began to queue it, and had queued it.
        start, end: on the device.
    """

    what: str
    way: str
    num_bytes: int
    runs: int
    asked: float
    queued: float
    start: float
    end: float


@dataclass(frozen=True)
class Call:
    """A call of the host, with all that it calls; on any thread. Times as `Work`'s."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Trace:
    """One move. `returned` is when its call returned, `idle` when the host knew that the device was idle, and
    `usable` when what was stored could be looked up; all in ms from the call."""

    works: list[Work]
    calls: list[Call]
    returned: float
    idle: float
    usable: float

    def copies(self, way: str) -> list[Work]:
        return [work for work in self.works if work.what == "copy" and work.way == way]

    def kernels(self, way: str) -> list[Work]:
        return [work for work in self.works if work.what != "copy" and work.way == way]


@dataclass(frozen=True)
class _Marked:
    what: str
    way: str
    num_bytes: int
    runs: int
    asked: float
    queued: float
    start: Event
    end: Event


class Recorder:
    """Records moves of a bed. Its events take a few microseconds of host and device for each copy."""

    def __init__(self, bed: MeasuredEngine) -> None:
        self._bed, self._platform = bed, bed.platform
        self._works: list[_Marked] = []
        self._calls: list[tuple[str, float, float]] = []

    def record(self, move: Move) -> Trace:
        """Make a move from an idle device, and wait until it has ended."""
        self._works, self._calls = [], []
        with self._watched():
            self._platform.synchronize_device(self._bed.device)
            origin = self._mark(self._platform.current_stream(self._bed.device))
            self._platform.synchronize_event(origin)
            begun = time.perf_counter()
            move()
            returned = time.perf_counter()
            self._bed.flush()
            usable = time.perf_counter()
            self._platform.synchronize_device(self._bed.device)
            idle = time.perf_counter()
        return self._trace(origin, begun, returned, idle, usable)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name in KERNELS:
                stack.enter_context(patch.object(Lane, name, self._watch_kernels(getattr(Lane, name))))
            for way in ("load", "save"):
                queue = getattr(self._platform, f"{way}_batch")
                watched = self._watch_copy(way, queue)
                stack.enter_context(patch.object(self._platform, f"{way}_batch", watched))
            for owner, name in HOST_CALLS:
                stack.enter_context(patch.object(owner, name, self._watch_call(owner, name)))
            yield

    def _watch_kernels(self, launch: Callable[..., None]) -> Callable[..., None]:
        def watched(lane: Lane, *arguments: Any) -> None:
            way = "load" if lane._loads else "save"
            self._note(launch.__name__, way, 0, 0, lane.kernels, lambda: launch(lane, *arguments))

        return watched

    def _watch_copy(self, way: str, queue: Callable[..., None]) -> Callable[..., None]:
        least = min(map(self._bed.engine.connector.page_bytes_of, self._bed.engine.connector.layers))

        def watched(buffer: Any, batch: CopyBatch, stream: Stream) -> None:
            # Tables go the same way, and are smaller than a page.
            if batch.sizes.max(initial=0) < least:
                queue(buffer, batch, stream)
                return
            size = int(batch.sizes.sum()), batch.sizes.size
            self._note("copy", way, *size, stream, lambda: queue(buffer, batch, stream))

        return watched

    def _watch_call(self, owner: Any, name: str) -> Callable[..., Any]:
        call = getattr(owner, name)

        @wraps(call)
        def watched(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            found = call(*arguments, **named)
            self._calls.append((name, start, time.perf_counter()))
            return found

        return watched

    def _note(self, what: str, way: str, num_bytes: int, runs: int, stream: Stream, queue: Move) -> None:
        start = self._mark(stream)
        asked = time.perf_counter()
        queue()
        queued = time.perf_counter()
        self._works.append(_Marked(what, way, num_bytes, runs, asked, queued, start, self._mark(stream)))

    def _mark(self, stream: Stream) -> Event:
        event = self._platform.new_event(timing=True)
        self._platform.record(event, stream)
        return event

    def _trace(self, origin: Event, begun: float, *marks: float) -> Trace:
        def host(seconds: float) -> float:
            return (seconds - begun) * 1e3

        def device(event: Event) -> float:
            return self._platform.elapsed_ms(origin, event) or 0.0

        works = [
            Work(
                each.what,
                each.way,
                each.num_bytes,
                each.runs,
                host(each.asked),
                host(each.queued),
                device(each.start),
                device(each.end),
            )
            for each in self._works
        ]
        calls = [Call(name, host(start), host(end)) for name, start, end in self._calls]
        return Trace(works, calls, *map(host, marks))
