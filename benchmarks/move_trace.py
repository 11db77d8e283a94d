"""Where the time of saves, loads and both at once goes, and what other ways of queueing a save would take.

python -m lwkv.benchmarks.move_trace --platform cuda --output trace
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from lwkv.benchmarks.bench.findings import table
from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.measuring.measured_engine import MeasuredEngine
from lwkv.benchmarks.measuring.shapes import SHAPES
from lwkv.benchmarks.measuring.timing import gb_per_s
from lwkv.benchmarks.trace.bare import WAYS, measure_ways
from lwkv.benchmarks.trace.losses import link_ms, losses
from lwkv.benchmarks.trace.recorder import Recorder, Trace
from lwkv.benchmarks.transfers.moves import alternate
from lwkv.platforms import detect_platform

PARTS = ("raw", "lossless", "fp8", "settings", "bare")
MIB = 1 << 20
SETTINGS: dict[str, dict[str, int]] = {
    "four buffers, 512 MiB": {"staging_buffers": 4, "staging_bytes": 512 * MIB},
    "groups of two layers": {"group_bytes": 64 * MIB},
    "half the staging": {"staging_bytes": 128 * MIB},
}
NAMES = ("load", "save", "both")
TRACES = 3


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lwkv.benchmarks.move_trace", description=__doc__)
    parser.add_argument("--platform", help="measure this platform")
    parser.add_argument("--shape", default="llama-8b", choices=SHAPES, help="whose KV cache and layers")
    parser.add_argument("--prefix", type=int, default=8192, metavar="N", help="tokens that are moved (8192)")
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="moves a median is taken of (9)")
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART,...", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--output", type=Path, default=Path("trace"), metavar="DIR", help="for files (trace)")
    options = parser.parse_args()
    platform = detect_platform(options.platform, None)
    device = platform.current_device()
    shape = replace(SHAPES[options.shape], dtype=torch.bfloat16)  # else no page could be coded
    bench = Bench(platform, device, shape, options.prefix, (1,), options.repeats)
    options.output.mkdir(parents=True, exist_ok=True)
    found = {}
    for part in options.only.split(","):
        start = time.perf_counter()
        with torch.inference_mode():
            found[part] = _measure(bench, part)
        print(f"-- {part}: {time.perf_counter() - start:.1f} s", flush=True)
        (options.output / "trace.json").write_text(json.dumps(found))


def _measure(bench: Bench, part: str) -> Any:
    if part == "bare":
        return {codec: _bare(bench, codec) for codec in ("raw", "lossless")}
    if part == "settings":
        return {name: _moves(bench, "raw", extra, ("save",)) for name, extra in SETTINGS.items()}
    return _moves(bench, part, {}, NAMES)


def _moves(bench: Bench, codec: str, extra: dict[str, int], names: Sequence[str]) -> dict[str, Any]:
    """Traces of moves with these settings, each behind its median without a recorder."""
    found = {}
    with bench.new_engine(config={"page_codec": codec, "extra_config": extra}) as bed:
        bed.fill()
        for name in names:
            move, before = _move(bed, name)
            ms = _median_ms(bench, bed, name, move, before)
            traces = []
            for _ in range(TRACES):
                before()
                traces.append(Recorder(bed).record(move))
            trace = sorted(traces, key=_whole_ms)[TRACES // 2]
            print("\n".join(_describe(bench, f"{name}, {codec}, {extra or 'as it is'}", name, ms, trace)))
            found[name] = {"ms": ms, "traces": [asdict(each) for each in traces]}
    return found


def _move(bed: MeasuredEngine, name: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """What is measured, and what is made ready before each time."""
    kept, new = bed.new_prompt(), [bed.new_prompt()]

    def save() -> None:
        bed.engine.store(new[0], slot_mapping=bed.source)

    def both() -> None:
        for _ in alternate(bed, kept, new[0]):
            pass

    def prepare() -> None:
        new[0] = bed.new_prompt()
        if name != "save":
            bed.keep(kept)
        bed.flush()

    moves = {"load": lambda: bed.load(kept), "save": save, "both": both}
    return moves[name], prepare


def _median_ms(
    bench: Bench, bed: MeasuredEngine, name: str, move: Callable[[], object], before: Callable[[], object]
) -> float:
    def whole() -> None:
        move()
        if name != "load":
            bed.flush()

    return bench.median_ms(whole, before)


def _whole_ms(trace: Trace) -> float:
    return trace.usable


def _describe(bench: Bench, title: str, name: str, ms: float, trace: Trace) -> Iterator[str]:
    ceilings = bench.ceilings
    speeds = {"load": ceilings.load_gb_s, "save": ceilings.save_gb_s}
    if name == "both":
        speeds = dict.fromkeys(speeds, ceilings.both_gb_s)
    plain = (
        bench.shape.kv_bytes(bench.prefix) / min(speeds.values() if name == "both" else [speeds[name]]) / 1e6
    )
    yield f"\n== {title}: {ms:.2f} ms, {plain / ms:.3f} of a plain copy of the raw bytes ({plain:.2f} ms)"
    yield f"with a recorder: call {trace.returned:.2f}, usable {trace.usable:.2f}, idle {trace.idle:.2f} ms"
    for way, gb_s in speeds.items():
        if trace.copies(way):
            yield from _losses(trace, way, gb_s)
    yield from _host(trace)
    for way in speeds:
        if trace.copies(way):
            yield from _groups(trace, way)


def _losses(trace: Trace, way: str, gb_s: float) -> Iterator[str]:
    copies, found = trace.copies(way), losses(trace, way, gb_s)
    runs = sum(copy.runs for copy in copies)
    yield f"{way}: the link {link_ms(trace, way, gb_s):.2f} ms, {len(copies)} copies of {runs} runs"
    yield from table(["  lost", "ms"], [[f"  {loss.cause}", f"{loss.ms:.3f}"] for loss in found])
    yield f"  the largest: {found[0].cause}, {found[0].ms:.2f} ms"


def _host(trace: Trace) -> Iterator[str]:
    """Calls before the first copy is queued, and those behind the last one's end."""
    copies = [work for work in trace.works if work.what == "copy"]
    first, last = copies[0].queued, max(copy.end for copy in copies)
    rows = [
        [f"  {call.name}", f"{call.start:.3f}", f"{(call.end - call.start) * 1e3:.0f}"]
        for call in sorted(trace.calls, key=lambda call: call.start)
        if call.start < first or call.end > last
    ]
    yield from table(["  host calls at the beginning and the end", "at ms", "us"], rows)


def _groups(trace: Trace, way: str) -> Iterator[str]:
    """One line for each staging buffer: its kernels, its copy, and the gap before that."""
    copies, kernels = trace.copies(way), trace.kernels(way)
    rows, free = [], 0.0
    for number, copy in enumerate(copies):
        kernel = kernels[number] if len(kernels) == len(copies) else None
        ms = copy.end - copy.start
        rows.append(
            [
                f"  {number}",
                *(
                    [f"{(kernel.queued - kernel.asked) * 1e3:.0f}", f"{kernel.start:.3f}"]
                    if kernel
                    else ["", ""]
                ),
                f"{(kernel.end - kernel.start) * 1e3:.0f}" if kernel else "",
                f"{copy.queued:.3f}",
                f"{(copy.queued - copy.asked) * 1e3:.0f}",
                f"{copy.start:.3f}",
                f"{(copy.start - free) * 1e3:.0f}",
                f"{copy.num_bytes / ms / 1e6:.1f}" if ms else "",
                f"{copy.runs}",
            ]
        )
        free = copy.end
    kernel_heads = ["launch us", "kernel at", "us"]
    copy_heads = ["copy queued", "us", "copy at", "idle us", "GB/s", "runs"]
    yield from table([f"  {way}", *kernel_heads, *copy_heads], rows)


def _bare(bench: Bench, codec: str) -> dict[str, list[float]]:
    rows, found = [], {}
    raw_bytes, gb_s = bench.shape.kv_bytes(bench.prefix), bench.ceilings.save_gb_s
    with bench.new_engine(prompts=2, config={"page_codec": codec}) as bed:
        bed.fill()
        for way, num_bytes, times in measure_ways(bed, WAYS, bench.repeats):
            ms = statistics.median(times)
            found[way.name] = times
            rows.append(
                [
                    f"  {way.name}",
                    f"{ms:.2f}",
                    f"{gb_per_s(num_bytes, ms) / gb_s:.3f}",
                    f"{gb_per_s(raw_bytes, ms) / gb_s:.3f}",
                ]
            )
    print(f"\n== saves without an engine, {codec}; a plain copy {gb_s:.1f} GB/s")
    print("\n".join(table(["  queued as", "ms", "of the link", "of raw bytes"], rows)), flush=True)
    return found


if __name__ == "__main__":
    main()
