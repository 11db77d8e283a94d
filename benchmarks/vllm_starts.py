"""How long a vLLM takes to start with much host memory: lwkv's, and that of vLLM's own offloading.

`python -m lwkv.benchmarks.vllm_starts` needs vLLM and a device. For each amount of host memory engines start
one after the other, each alone, with a model of few layers and without CUDA graphs, so that little else takes
time. Reported are the seconds until each was ready, and its first two prompts, which nobody computed before.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from lwkv.benchmarks.measuring.shapes import Shape
from lwkv.benchmarks.vllm.engines import MODES, parse_modes, started
from lwkv.benchmarks.vllm.load import Load
from lwkv.benchmarks.vllm.options import parser_of, shape_of
from lwkv.benchmarks.vllm_ttft import versions

PROMPTS = Load(0, 0.2, 0.1, 1024, 64, prepare=True)


@dataclass(frozen=True)
class Sizes:
    """What an engine is made for; see Sized."""

    host_gib: float | None
    eager: bool
    tokens_cached: int = 2 * (PROMPTS.prefix + PROMPTS.suffix)
    tokens_in_gpu: int = 4 * (PROMPTS.prefix + PROMPTS.suffix)
    longest: int = PROMPTS.prefix + PROMPTS.suffix


@dataclass(frozen=True)
class Start:
    """An engine that was to be started; `cold_ms` are its first prompts.

    Attributes:
        start_s: seconds until it was ready; None where it was not, for the reason in `failed`.
    """

    mode: str
    host_gib: float
    start_s: float | None = None
    cold_ms: list[float] = field(default_factory=list)
    failed: str = ""


def measure(
    modes: Sequence[str], gib: Sequence[float], shape: Shape, eager: bool, limit_s: float
) -> list[Start]:
    """Start all; those that would begin more than `limit_s` seconds after the first are left out."""
    begin, starts = time.perf_counter(), []
    for host_gib in gib:
        for mode in modes:
            if time.perf_counter() - begin > limit_s:
                starts.append(Start(mode, host_gib, failed="not begun, the time was over"))
            else:
                starts.append(_start(mode, host_gib, shape, eager))
            print(_line(starts[-1]), flush=True)
    return starts


def _start(mode: str, host_gib: float, shape: Shape, eager: bool) -> Start:
    try:
        with started([mode], shape, Sizes(host_gib, eager)) as (engine,):
            return Start(mode, host_gib, engine.start_s, engine.serve(PROMPTS).cold_ms)
    except RuntimeError as error:  # such as for lack of memory; others may start with as much
        return Start(mode, host_gib, failed=str(error))


def _line(start: Start) -> str:
    if start.start_s is None:
        return f"{start.mode}, {start.host_gib:g} GiB: {start.failed}"
    cold = ", ".join(f"{ms:.0f}" for ms in start.cold_ms)
    return f"{start.mode}, {start.host_gib:g} GiB: ready after {start.start_s:.1f} s; first prompts {cold} ms"


def main() -> int:
    parser = parser_of("vllm_starts", __doc__)
    parser.add_argument("--engines", default="native,lwkv", help=f"by comma, some of {', '.join(MODES)}")
    parser.add_argument("--gib", default="20,100", help="host memory in GiB, by comma, in this order")
    parser.add_argument("--layers", type=int, default=4, help="of the model; each has the shape's sizes")
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs, as a service starts")
    parser.add_argument(
        "--limit", type=float, default=80.0, metavar="S", help="begin no engine after so many seconds"
    )
    args = parser.parse_args()
    shape = replace(shape_of(args), num_layers=args.layers)
    gib = [float(number) for number in args.gib.split(",")]
    starts = measure(parse_modes(args.engines), gib, shape, not args.graphs, args.limit)
    found = {"command": sys.argv[1:], "versions": versions(), "starts": [asdict(start) for start in starts]}
    args.output.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
