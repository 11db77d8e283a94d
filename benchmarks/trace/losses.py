"""What a move took beyond the link's own time, by cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lwkv.benchmarks.trace.recorder import Trace, Work

HOST_FIRST = "the host, before the first work is queued"
KERNEL_FIRST = "the first kernels, which the first copy waits for"
START_FIRST = "from there until the first copy starts"
HOST_LATE = "copies that the host queued late"
KERNEL_LATE = "copies that waited for kernels"
BETWEEN = "between copies that were ready: events and the start of a copy"
SLOW = "copies slower than the link"
KERNEL_LAST = "kernels behind the last copy"
END = "the end, until the bytes can be used"


@dataclass(frozen=True)
class Loss:
    """Milliseconds lost to one cause; negative where copies were faster than the plain one."""

    cause: str
    ms: float


def losses(trace: Trace, way: str, gb_s: float) -> list[Loss]:
    """What `way` of a trace lost, largest first; with the link's own time the sum is the whole.

    A load ends when the device is done with it, a store when its chunks can be looked up.

    Args:
        gb_s: of a plain copy.
    """
    copies, kernels = trace.copies(way), trace.kernels(way)
    lost: Counter[str] = Counter()
    for number, copy in enumerate(copies):
        if number == 0:
            _add_first(lost, copy, _kernels_before(copy, kernels) if way == "save" else None)
        else:
            before = (_kernels_before if way == "save" else _kernels_emptying)(copy, kernels)
            _add_gap(lost, copies[number - 1].end, copy, before)
        _add(lost, SLOW, copy.end - copy.start - copy.num_bytes / gb_s / 1e6)
    _add_end(lost, trace, way, copies, kernels)
    return [Loss(cause, ms) for cause, ms in lost.most_common()]


def link_ms(trace: Trace, way: str, gb_s: float) -> float:
    """What the link itself takes for the copies of a trace."""
    return sum(copy.num_bytes for copy in trace.copies(way)) / gb_s / 1e6


def _kernels_before(copy: Work, kernels: Sequence[Work]) -> Work | None:
    """Those that fill the buffer that is copied: the last ones queued before it."""
    before = [kernel for kernel in kernels if kernel.queued <= copy.asked]
    return before[-1] if before else None


def _kernels_emptying(copy: Work, kernels: Sequence[Work]) -> Work | None:
    """Those that ended last before a copy to the device starts: its buffer may have been theirs."""
    return max((kernel for kernel in kernels if kernel.end <= copy.start), key=_end, default=None)


def _end(work: Work) -> float:
    return work.end


def _add_first(lost: Counter[str], copy: Work, before: Work | None) -> None:
    if before is None:
        _split(lost, 0.0, copy.start, ((HOST_FIRST, copy.queued),), START_FIRST)
    else:
        steps = (HOST_FIRST, before.queued), (KERNEL_FIRST, before.end), (HOST_LATE, copy.queued)
        _split(lost, 0.0, copy.start, steps, START_FIRST)


def _add_gap(lost: Counter[str], free: float, copy: Work, before: Work | None) -> None:
    steps = [(HOST_LATE, copy.queued)]
    if before is not None:
        steps.append((KERNEL_LATE, before.end))
    _split(lost, free, copy.start, steps, BETWEEN)


def _add_end(
    lost: Counter[str], trace: Trace, way: str, copies: Sequence[Work], kernels: Sequence[Work]
) -> None:
    last = copies[-1].end
    if way == "load":
        done = max([last, *(kernel.end for kernel in kernels)])
        _add(lost, KERNEL_LAST, done - last)
    else:
        _add(lost, END, trace.usable - last)


def _split(
    lost: Counter[str], start: float, end: float, steps: Sequence[tuple[str, float]], rest: str
) -> None:
    """Divide a gap: each cause has the time up to its mark, as far as that is in the gap."""
    for cause, mark in steps:
        reached = min(max(start, mark), end)
        _add(lost, cause, reached - start)
        start = reached
    _add(lost, rest, end - start)


def _add(lost: Counter[str], cause: str, ms: float) -> None:
    lost[cause] += ms  # type: ignore[assignment]
