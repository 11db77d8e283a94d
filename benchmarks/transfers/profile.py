"""Where the time of one load and of one save goes that is not the link's."""

from __future__ import annotations

import cProfile
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import CodeType
from typing import Any
from unittest.mock import patch

from lwkv.benchmarks.bench.findings import Findings, table
from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.measuring.measured_engine import MeasuredEngine
from lwkv.platforms import CopyBatch

OURS = f"{Path(__file__).parents[2]}/"
NUM_FUNCTIONS = 16
Move = Callable[[], object]


@dataclass(frozen=True)
class Function:
    """A function's time with all that it calls, as a share of the time before the first copy.

    The profiler that finds it makes short functions look longer than they are.
    """

    name: str
    share: float


@dataclass(frozen=True)
class Profile:
    """Milliseconds of a move of the run's prefix, medians: one after the other, their sum is the whole.

    Attributes:
        start_ms: from the call until the first page is queued.
        copies_ms: from there until the device is idle.
        end_ms: from there until the bytes can be used: for a save, looked up.
        functions: where the host is before the first copy, the longest first.
    """

    name: str
    start_ms: float
    copies_ms: float
    end_ms: float
    functions: list[Function]


@dataclass(frozen=True)
class Profiles(Findings):
    """A load and a save; `link_ms` are those of plain copies of as many bytes."""

    link_ms: list[float]
    profiles: list[Profile]

    def lines(self, absolute: bool) -> Iterator[str]:
        for profile, link_ms in zip(self.profiles, self.link_ms, strict=True):
            if absolute:
                parts = f"{profile.start_ms:.2f} + {profile.copies_ms:.2f} + {profile.end_ms:.2f} ms"
                yield f"{profile.name}: {parts} (start, copies, end); a plain copy {link_ms:.2f}"
            yield f"{profile.name}: where the host is before the first copy"
            rows = [[function.name, f"{function.share:.2f}"] for function in profile.functions]
            yield from table(["  with all it calls", "share"], rows)


def measure_profile(bench: Bench) -> Profiles:
    """Move the run's prefix to the device and back, all layers at once."""
    with bench.new_engine() as measured:
        kept = measured.new_prompt()

        def load() -> None:
            measured.load(kept)

        def save() -> None:
            measured.engine.store(measured.new_prompt(), slot_mapping=measured.source)

        found = [
            _measure(bench, measured, "load", load, before=lambda: measured.keep(kept)),
            _measure(bench, measured, "save", save, before=measured.flush),
        ]
    speeds = bench.ceilings.load_gb_s, bench.ceilings.save_gb_s
    num_bytes = bench.shape.kv_bytes(bench.prefix)
    return Profiles([num_bytes / speed / 1e6 for speed in speeds], found)


def _measure(bench: Bench, measured: MeasuredEngine, name: str, move: Move, before: Move) -> Profile:
    rounds = []
    for _ in range(bench.repeats + 1):
        before()
        measured.platform.synchronize_device(measured.device)
        rounds.append(_times(measured, name, move))
    start, copies, end = (statistics.median(times) for times in zip(*rounds[1:], strict=True))
    profiler = cProfile.Profile()
    for _ in range(bench.repeats):
        before()
        with _at_first_page(measured, name, profiler.disable):
            profiler.runcall(move)
    return Profile(name, start, copies, end, _functions(profiler))


def _times(measured: MeasuredEngine, name: str, move: Move) -> tuple[float, float, float]:
    marks = [time.perf_counter()]

    def mark() -> None:
        marks.append(time.perf_counter())

    with _at_first_page(measured, name, mark):
        move()
    measured.platform.synchronize_device(measured.device)
    mark()
    measured.flush()
    mark()
    start, copies, end = ((after - first) * 1e3 for first, after in pairwise(marks))
    return start, copies, end


@contextmanager
def _at_first_page(measured: MeasuredEngine, name: str, note: Callable[[], object]) -> Iterator[None]:
    """Call `note` once, when the platform is given the first batch that has pages in it."""
    method = f"{name}_batch"
    queue = getattr(measured.platform, method)
    waiting = [note]

    def queue_and_note(buffer: Any, batch: CopyBatch, stream: Any) -> None:
        queue(buffer, batch, stream)
        # Tables go the same way, and are smaller than a page.
        if waiting and batch.sizes.max(initial=0) >= measured.engine.connector.page_bytes:
            waiting.pop()()

    with patch.object(measured.platform, method, queue_and_note):
        yield


def _functions(profiler: cProfile.Profile) -> list[Function]:
    seconds: Counter[str] = Counter()
    for entry in profiler.getstats():
        if isinstance(entry.code, CodeType) and entry.code.co_filename.startswith(OURS):
            seconds[_name(entry.code)] += entry.totaltime  # type: ignore[assignment]
    whole = max(seconds.values(), default=1.0)
    return [Function(name, spent / whole) for name, spent in seconds.most_common(NUM_FUNCTIONS)]


def _name(code: CodeType) -> str:
    return f"{code.co_filename.removeprefix(OURS).removesuffix('.py')}: {code.co_name}"
