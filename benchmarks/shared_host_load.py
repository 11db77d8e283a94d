"""Loads out of the memory of `lwkv host` beside loads out of an engine's own: speed, and time to start.

Each measurement is made by a process of its own, on its own device where there are several. Run it with
`python -m lwkv.benchmarks.shared_host_load`; it prints JSON. No model is needed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lwkv.benchmarks.measuring.idle_owner import timed_pin
from lwkv.benchmarks.measuring.measured_engine import MeasuredEngine, Slots
from lwkv.benchmarks.measuring.owner import owner_of
from lwkv.benchmarks.measuring.scheduled_loads import ScheduledLoads
from lwkv.benchmarks.measuring.shapes import SHAPES
from lwkv.benchmarks.measuring.timing import alternate_ms
from lwkv.pipeline.pinned_load import PinnedChunks, PinnedLoad
from lwkv.platforms import detect_platform
from lwkv.pool.host_pool import PAGE_ALIGNMENT
from lwkv.shared_host.mapping import HUGE_LINES

GATE = 0.98
"""The least that the speed of vLLM's loads from a node's memory may be of that from own memory."""

OWN, NODE = "own", "node"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Returns 0, or 1 if the gate is missed or a byte is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--gib", type=float, default=40.0, help="host memory of each engine, and of the owner"
    )
    parser.add_argument("--shape", default="llama-8b", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a load")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=2, help="processes of each kind, in turn")
    parser.add_argument("--devices", type=int, default=1, help="of this machine, measured at the same time")
    parser.add_argument("--kind", choices=(OWN, NODE), help=argparse.SUPPRESS)
    parser.add_argument("--device", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--socket", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.kind is not None:
        print(json.dumps(_measure(args)), flush=True)
        return 0
    result = _compare(args)
    print(json.dumps(result, indent=2))
    return 0 if result["passed"] else 1


def _compare(args: argparse.Namespace) -> dict[str, Any]:
    with owner_of(args.gib) as (path, owner_s):
        found: dict[str, list[dict[str, Any]]] = {OWN: [], NODE: []}
        for _ in range(args.rounds):
            for kind, results in found.items():
                results += _together(args, kind, path)
    speed = {kind: statistics.median(run["load_gb_s"] for run in runs) for kind, runs in found.items()}
    in_vllm = {kind: statistics.median(run["vllm_load_ms"] for run in runs) for kind, runs in found.items()}
    ratio = in_vllm[OWN] / in_vllm[NODE]
    right = all(run["bytes_are_right"] for runs in found.values() for run in runs)
    return {
        "gib": args.gib,
        "devices": args.devices,
        "owner_ready_s": owner_s,
        "load_gb_s": speed,
        "ratio": speed[NODE] / speed[OWN],
        "vllm_ratio": ratio,
        "gate": GATE,
        "passed": right and ratio >= GATE,
        **{
            name: {kind: [run[name] for run in runs] for kind, runs in found.items()}
            for name in (
                "start_s",
                "locked_s",
                "pinned_load_ms",
                "vllm_load_ms",
                "promise_ms",
                "pin_ms",
                "announced_pin_ms",
                "huge_page_share",
            )
        },
        "runs": found,
    }


def _together(args: argparse.Namespace, kind: str, path: str) -> list[dict[str, Any]]:
    """Start a process for each device, and have all of them load at the same time."""
    command = [sys.executable, "-m", "lwkv.benchmarks.shared_host_load", "--kind", kind, "--socket", path]
    command += ["--gib", str(args.gib / (args.devices if kind == OWN else 1)), "--shape", args.shape]
    command += ["--tokens", str(args.tokens), "--repeats", str(args.repeats)]
    children = [_Child([*command, "--device", str(number)]) for number in range(args.devices)]
    for child in children:
        child.wait_ready()
    for child in children:
        child.go()
    return [child.result() for child in children]


class _Child:
    """A measuring process, which says when it is ready and waits until it may go."""

    def __init__(self, command: Sequence[str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def wait_ready(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError("a measuring process ended before it began; its error is above")

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._process.communicate()[0])
        return found


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    """Start an engine with all of its memory page-locked, and load a prompt again and again."""
    platform, shape = detect_platform(), SHAPES[args.shape]
    is_host = platform.device_type == "cpu"
    device = torch.device("cpu") if is_host else torch.device(platform.device_type, args.device)
    platform.set_device(device)
    torch.zeros(1, device=device)  # the device's own start is in nobody's time
    page = -(-shape.chunk_size * shape.token_bytes // PAGE_ALIGNMENT) * PAGE_ALIGNMENT
    prompt_bytes = shape.num_layers * (args.tokens // shape.chunk_size) * page
    # Half a percent stays free: slabs are whole pages.
    prompts = max(2, int(args.gib * 0.995 * (1 << 30)) // prompt_bytes)
    settings = {"host_memory": args.socket} if args.kind == NODE else {}
    begun = time.monotonic()
    # Prompts of other processes have other bytes.
    first = 1000 * (time.monotonic_ns() % (1 << 30))
    with MeasuredEngine(
        platform, device, shape, args.tokens, prompts=prompts, config=settings, first_prompt=first
    ) as measured:
        start_s = time.monotonic() - begun
        measured.engine.wait_for_memory(600.0)
        locked_s = time.monotonic() - begun
        measured.fill()
        tokens = measured.new_prompt()
        measured.keep(tokens)
        print("ready", flush=True)
        sys.stdin.readline()
        [times] = alternate_ms(
            platform, device, [lambda: measured.load(tokens)], args.repeats, measured.clear_target
        )
        right = measured.places_agree()
        pinned = _pinned_load_ms(measured, tokens, args.repeats)
        right = right and measured.places_agree()
        in_vllm, promise = _vllm_load_ms(measured, tokens, args.repeats, settings.get("host_memory", ""))
        right = right and measured.places_agree()
        moved = shape.num_layers * args.tokens * shape.token_bytes
        median = statistics.median(times)
        return {
            "device": args.device,
            "start_s": start_s,
            "locked_s": locked_s,
            "load_ms": median,
            "load_gb_s": moved / median / 1e6,
            "pinned_load_ms": pinned,
            "vllm_load_ms": in_vllm,
            "promise_ms": promise,
            "pin_ms": _pin_ms(measured, tokens, args.repeats),
            "announced_pin_ms": _pin_ms(measured, tokens, args.repeats, announces=True),
            "huge_page_share": _huge_page_share(),
            "bytes_are_right": right,
        }


def _pinned_load_ms(measured: MeasuredEngine, tokens: Slots, repeats: int) -> float:
    """A load of chunks that were pinned before its time: the copies, without looking for anything."""
    context, keys = measured.engine.parts(), measured.engine.keys(tokens)
    pinned: list[PinnedChunks] = []
    slots = torch.from_numpy(measured.target).to(measured.device)

    def pin() -> None:
        measured.clear_target()
        measured.flush()  # what was pinned before is given back
        pinned[:] = [PinnedChunks(keys, context.storage.host.pin_prefix(keys), slots)]

    def load() -> None:
        current = measured.platform.current_stream(measured.device)
        load = PinnedLoad(context, pinned, lambda stream: measured.platform.wait_stream(stream, current))
        load.finish()
        load.give_back()

    [times] = alternate_ms(measured.platform, measured.device, [load], repeats, pin)
    measured.flush()
    return statistics.median(times)


def _vllm_load_ms(
    measured: MeasuredEngine, tokens: Slots, repeats: int, socket: str
) -> tuple[float, float | None]:
    """A load as in a step of vLLM; and the look-up before it that promises, None with own memory."""
    loads = ScheduledLoads(measured, tokens, socket)
    try:
        [times] = alternate_ms(measured.platform, measured.device, [loads.load], repeats, loads.prepare)
        measured.flush()
    finally:
        loads.close()
    return statistics.median(times), statistics.median(loads.promise_ms) if socket else None


def _pin_ms(measured: MeasuredEngine, tokens: Slots, repeats: int, announces: bool = False) -> float:
    """How long the host looks for all chunks and pins them, after it and the owner have been idle.

    Args:
        announces: whether that is announced before, as a load does.
    """
    host, keys, times = measured.engine.parts().storage.host, measured.engine.keys(tokens), []
    for _ in range(repeats):
        took_ms, chunks = timed_pin(partial(host.pin_prefix, keys), host.announce if announces else None)
        times.append(took_ms)
        host.unpin(chunks)
    return statistics.median(times)


def _huge_page_share() -> float | None:
    """How much of the owner's memory is mapped in huge pages here; None where none of it is mapped."""
    size = huge = 0
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line[0] in "0123456789abcdef":
            is_inside = "memfd:lwkv-host" in line
        elif is_inside and line.startswith(("Size:", *HUGE_LINES)):
            kib = int(line.split()[1])
            size, huge = (size + kib, huge) if line.startswith("Size:") else (size, huge + kib)
    return huge / size if size else None


if __name__ == "__main__":
    sys.exit(main())
