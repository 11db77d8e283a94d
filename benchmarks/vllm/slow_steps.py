"""What the threads of an engine do while one of its steps takes unusually long, to find the cause.

Off unless the environment variable BENCH_SLOW_STEPS gives a number of milliseconds. Each step that takes
longer writes to stderr: how often each thread was seen where, what it took of a core, how often the
engine's thread had to wait, and how late a thread came that slept for a moment: it waits for the interpreter
as the engine's does.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType

VARIABLE = "BENCH_SLOW_STEPS"
SAMPLE_S = 0.01
MOST_FRAMES = 6
MOST_PLACES = 4


def watch() -> SlowSteps | None:
    """A watch for the calling thread, if it is asked for."""
    limit_ms = os.environ.get(VARIABLE)
    return SlowSteps(float(limit_ms) / 1e3) if limit_ms else None


def during(watched: SlowSteps | None) -> AbstractContextManager[None]:
    """Around a step."""
    return nullcontext() if watched is None else watched.step()


class SlowSteps:
    """Samples all threads while a step of the thread that has made it takes longer than `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._engine = threading.get_ident()
        self._task = threading.get_native_id()
        self._since: float | None = None
        self._number = 0
        threading.Thread(target=self._run, name="slow-steps", daemon=True).start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step."""
        self._number += 1
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self._since = None

    def _run(self) -> None:
        while True:
            time.sleep(SAMPLE_S)
            since, number = self._since, self._number
            if since is not None and time.perf_counter() - since > self._limit_s / 2:
                self._follow(number, since)

    def _follow(self, number: int, since: float) -> None:
        """Sample until the step has ended, and report it if it was slow."""
        places: Counter[tuple[str, str]] = Counter()
        before, waits, late, count = cpu_seconds(), num_waits(self._task), 0.0, 0
        while self._since is not None and self._number == number:
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for ident, frame in sys._current_frames().items():
                name = "engine" if ident == self._engine else names.get(ident, "?")
                places[name, where(frame)] += 1
            count += 1
            begin = time.perf_counter()
            time.sleep(SAMPLE_S)
            late = max(late, time.perf_counter() - begin - SAMPLE_S)
        if time.perf_counter() - since > self._limit_s:
            self._report(number, time.perf_counter() - since, count, late, waits, before, places)

    def _report(
        self,
        number: int,
        seconds: float,
        count: int,
        late: float,
        waits: int,
        before: dict[str, float],
        places: Counter[tuple[str, str]],
    ) -> None:
        used = {name: after - before.get(name, 0.0) for name, after in cpu_seconds().items()}
        lines = [
            f"slow step {number}: {1e3 * seconds:.0f} ms; {count} samples, the latest {1e3 * late:.1f} ms "
            f"late; the engine's thread waited {num_waits(self._task) - waits} times in the sampled part"
        ]
        by_thread = sorted(used.items(), key=lambda item: -item[1])
        lines += [f"  core {name}: {1e3 * cpu:.0f} ms" for name, cpu in by_thread if cpu > 0.005]
        shown: Counter[str] = Counter()
        for (name, place), times in places.most_common():
            shown[name] += 1
            if shown[name] <= MOST_PLACES and (name == "engine" or not is_idle(place)):
                lines.append(f"  {times:4d} {name}: {place}")
        print("\n".join(lines), file=sys.stderr, flush=True)


def where(frame: FrameType) -> str:
    """The innermost calls of a stack, the innermost first."""
    calls: list[str] = []
    at: FrameType | None = frame
    while at is not None and len(calls) < MOST_FRAMES:
        calls.append(f"{Path(at.f_code.co_filename).name}:{at.f_lineno}:{at.f_code.co_name}")
        at = at.f_back
    return " < ".join(calls)


def is_idle(place: str) -> bool:
    """Whether a thread waits for something to do there."""
    first = place.split(" < ")[0]
    return first.endswith((":next", ":wait", ":_follow", ":get"))


def cpu_seconds() -> dict[str, float]:
    """What each thread of the process has taken of a core, by the system's name and number of it."""
    used = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            name, _, rest = (task / "stat").read_text().rpartition(")")
        except OSError:  # it has ended
            continue
        ticks = sum(map(int, rest.split()[11:13]))
        used[f"{name.partition('(')[2]} {task.name}"] = ticks / os.sysconf("SC_CLK_TCK")
    return used


def num_waits(task: int) -> int:
    """How often a thread gave its core up to wait for something; 0 where the system does not say."""
    status = Path(f"/proc/self/task/{task}/status").read_text()
    lines = [line for line in status.splitlines() if line.startswith("voluntary_ctxt_switches")]
    return int(lines[0].split()[1]) if lines else 0
