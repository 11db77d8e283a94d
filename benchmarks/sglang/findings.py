"""What was measured in SGLang, and tables of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from lwkv.benchmarks.measuring.timing import percentile
from lwkv.benchmarks.sglang.load import Served


@dataclass
class Case:
    """What one engine did: milliseconds by kind of prompt, and what went wrong.

    `host_ms` has the time of the scheduler's thread for each batch with a load, by call; `served` and
    `host_ms_beside` are those of prompts that arrive beside requests that decode. `stalls` has what Stalls
    found of some batches with nothing beside.

    Kinds: "computed" is a prompt that is in no cache, "suffix" its new tokens alone, "device" a prompt whose
    prefix is in the device's cache, "host" one whose prefix is in host memory.
    """

    mode: str
    ms: dict[str, list[float]] = field(default_factory=dict)
    same: dict[str, tuple[int, float]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    host_ms: list[dict[str, float]] = field(default_factory=list)
    served: Served | None = None
    host_ms_beside: list[dict[str, float]] = field(default_factory=list)
    stalls: list[dict[str, float]] = field(default_factory=list)


def table(cases: Sequence[Case]) -> str:
    """Medians in milliseconds."""
    kinds = ("computed", "suffix", "device", "host")
    lines = [f"| mode | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for case in cases:
        times = [f"{median(case.ms[kind]):.1f}" if kind in case.ms else "" for kind in kinds]
        lines.append(f"| {case.mode} | {' | '.join(times)} |")
    return "\n".join(lines)


def call_table(cases: Sequence[Case]) -> str:
    """What the calls of a batch with a load took of the scheduler's thread: medians in milliseconds."""
    lines = []
    for case in cases:
        for where, batches in (("alone", case.host_ms), ("beside requests", case.host_ms_beside)):
            names = sorted({name for batch in batches for name in batch})
            times = [f"{name} {median(batch.get(name, 0.0) for batch in batches):.3f}" for name in names]
            lines += [f"{case.mode}, {where}: {', '.join(times)}"] * bool(batches)
    return "\n".join(lines)


def served_table(cases: Sequence[Case]) -> str:
    """Prompts that arrived beside requests that decode, in milliseconds; empty without any."""
    heads = ["mode", "TTFT p50", "p99", "between tokens p50", "p99", "most", "decoded tokens/s"]
    rows = [[case.mode, *_served_row(case.served)] for case in cases if case.served]
    lines = [heads, ["---"] * len(heads), *rows] if rows else []
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _served_row(served: Served) -> list[str]:
    first = [f"{percentile(served.ttft_ms, share):.1f}" for share in (0.5, 0.99)]
    gaps = [f"{percentile(served.gaps_ms, share):.1f}" for share in (0.5, 0.99, 1.0)]
    return [*first, *gaps, f"{served.decoded / max(served.seconds, 1e-9):.0f}"]
