"""The subcommand: its arguments, its files, its exit code."""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from lwkv.benchmarks.bench.bars import draw_bars
from lwkv.benchmarks.bench.parts import PARTS, choose_parts
from lwkv.benchmarks.bench.result import Result
from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.measuring.shapes import SHAPES
from lwkv.benchmarks.prefills.recorded import Recorded
from lwkv.cli.run_setup import core_for_transfers, make_writable
from lwkv.config.secrets import cut
from lwkv.errors import ConfigError
from lwkv.platforms import Platform, detect_platform
from lwkv.platforms.registry import VARIABLE
from lwkv.telemetry.timeline_picture import draw_timeline
from lwkv.telemetry.timeline_trace import write_trace


@dataclass(frozen=True)
class Defaults:
    """What is measured where nothing else is asked for."""

    shape: str
    prefix: int
    suffixes: tuple[int, ...]
    repeats: int


ON_DEVICE = Defaults("llama-8b", 8192, (64, 128, 256, 512, 1024, 2048, 4096), 7)
ON_HOST = Defaults("tiny", 2048, (16, 64, 128), 5)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--platform", metavar="NAME", help=f"measure this platform, whatever {VARIABLE} says")
    parser.add_argument(
        "--shape",
        metavar="NAME",
        help=f"whose KV cache and layers: {', '.join(SHAPES)} ({_default('shape')})",
    )
    parser.add_argument("--prefix", type=int, metavar="N", help=f"tokens cached ({_default('prefix')})")
    parser.add_argument(
        "--suffixes",
        type=_numbers,
        metavar="N,...",
        help=f"tokens computed over them, one prefill each ({_default('suffixes')})",
    )
    parser.add_argument(
        "--repeats", type=int, metavar="N", help=f"runs of which a median is taken ({_default('repeats')})"
    )
    parser.add_argument(
        "--only", type=_names, default=(), metavar="PART,...", help=f"only these parts of {', '.join(PARTS)}"
    )
    parser.add_argument("--peers", action="store_true", help="measure LMCache too, where it is installed")
    parser.add_argument(
        "--output", type=Path, default=Path("bench-output"), metavar="DIR", help="for files (bench-output)"
    )
    parser.add_argument(
        "--disk", type=Path, metavar="DIR", help="a folder of the disk to measure (where temporary files are)"
    )
    parser.add_argument(
        "--page-codec", default="auto", metavar="NAME", help="the setting of that name, for all parts (auto)"
    )
    parser.add_argument("--remote", metavar="URL", help="the server of a remote tier to measure (none)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Measure, write the files and print what was found. Returns 0, or 1 if any byte was wrong.

    Raises ConfigError, ValueError or RuntimeError for what the user has to change: the platform, a shape or
    part that there is not, sizes that do not fit, a folder that cannot be written to.
    """
    platform = detect_platform(args.platform)
    bench = _bench(platform, args)
    parts = choose_parts(platform, args.only, args.peers)
    make_writable(args.output)
    with core_for_transfers(platform):
        result = Result.begin(bench, _command(bench, parts, args.output))
        _measure(result, parts, args.output / "result.json")
    files = [args.output / "result.json", *_draw(result, args.output)]
    print(json.dumps(result.to_json(), indent=2) if args.json else "\n".join([*result.lines(), "", "Files"]))
    if not args.json:
        print("\n".join(f"  {file}" for file in files))
    return 1 if result.faults() else 0


def _bench(platform: Platform, args: argparse.Namespace) -> Bench:
    usual = asdict(ON_HOST if platform.device_type == "cpu" else ON_DEVICE)
    chosen = {
        key: value if getattr(args, key) is None else getattr(args, key) for key, value in usual.items()
    }
    name = chosen.pop("shape")
    if name not in SHAPES:
        raise ConfigError(f"no shape {name!r}; there are {', '.join(SHAPES)}")
    device = platform.current_device()
    return Bench(
        platform,
        device,
        SHAPES[name],
        disk=args.disk,
        remote=args.remote,
        page_codec=args.page_codec,
        **chosen,
    )


def _command(bench: Bench, parts: list[str], output: Path) -> str:
    """The command that measures the same again, with nothing left to defaults."""
    options = {
        "platform": bench.platform.name,
        "shape": bench.shape.name,
        "prefix": bench.prefix,
        "suffixes": _listed(bench.suffixes),
        "repeats": bench.repeats,
        "only": ",".join(parts),
        "output": output,
        **({"page-codec": bench.page_codec} if bench.page_codec != "auto" else {}),
        **({"disk": bench.disk} if bench.disk else {}),
        **({"remote": cut(bench.remote)} if bench.remote else {}),
    }
    return shlex.join(
        ["lwkv", "bench", *(word for key, value in options.items() for word in (f"--{key}", str(value)))]
    )


def _measure(result: Result, parts: list[str], path: Path) -> None:
    """Run the parts one by one; what was found is in the file after each, should a later one not end."""
    for name in parts:
        print(f"lwkv bench: {name} ...", file=sys.stderr, flush=True)
        start = time.perf_counter()
        result.parts[name] = PARTS[name].measure(result.bench)
        # Engines and caches of one part are not to be there in the next.
        gc.collect()
        result.part_ms[name] = (time.perf_counter() - start) * 1e3
        result.write(path)


def _draw(result: Result, folder: Path) -> Iterator[Path]:
    """Write what there is to see: bars, and picture and trace of the recorded prefill."""
    recorded = result.parts.get("timeline")
    if isinstance(recorded, Recorded):
        trace = folder / "prefill.trace.json"
        write_trace(recorded.timeline(), trace)
        yield trace
    if not find_spec("matplotlib"):
        print(
            "lwkv bench: no pictures without matplotlib: pip install '.[bench]' in lwkv's folder",
            file=sys.stderr,
        )
        return
    if isinstance(recorded, Recorded):
        title = (
            f"Prefill of {recorded.suffix} tokens over {recorded.prefix} cached ones\n"
            "one run, recorded and with stores; the medians in bars.png are of runs without these"
        )
        draw_timeline(recorded.timeline(), folder / "prefill.png", title)
        yield folder / "prefill.png"
    if draw_bars(result.to_json(), folder / "bars.png"):
        yield folder / "bars.png"


def _default(key: str) -> str:
    told = [_listed(getattr(defaults, key)) for defaults in (ON_DEVICE, ON_HOST)]
    return f"{told[0]}; on cpu {told[1]}"


def _listed(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _names(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(text: str) -> tuple[int, ...]:
    words = _names(text)
    if not words or not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 64,512")
    return tuple(map(int, words))
