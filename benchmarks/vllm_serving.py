"""A vLLM that serves: requests decode while cached prompts arrive, with lwkv and without.

`python -m lwkv.benchmarks.vllm_serving` needs vLLM and a device. Engines run one after the other, each alone
on the device. Weights are dummies: the times are those of the shape. Reported are the time to first token of
the prompts that arrive, the time between two tokens of those that decode, and decoded tokens a second.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from lwkv.benchmarks.measuring.child import Child
from lwkv.benchmarks.measuring.shapes import SHAPES, Shape
from lwkv.benchmarks.measuring.timing import percentile
from lwkv.benchmarks.throttled.remote import installed_in
from lwkv.benchmarks.vllm.conversations import Conversations, Conversed
from lwkv.benchmarks.vllm.load import Load, Served
from lwkv.benchmarks.vllm_ttft import versions, write_model

MODES = ("plain", "lwkv", "lwkv-bulk", "native", "lwkv-disk", "lwkv-1000", "lwkv-100", "lmcache")
"""Without a cache, lwkv by default and in bulk, vLLM's own offloading, lwkv with nearly all on disk or in a
store of 1000 or 100 MB/s, and LMCache, which must be installed."""
DEFAULT_MODES = MODES[:5]


@dataclass(frozen=True)
class Plan:
    """The loads that each engine gets: decoding alone by batch size, then prompts beside 16 that decode."""

    batches: Sequence[int]
    seconds: float
    every_s: float
    prefix: int
    suffix: int
    eager: bool = False

    def loads(self) -> list[Load]:
        alone = [Load(batch, self.seconds / 4, 0.0, self.prefix, self.suffix) for batch in self.batches]
        beside = Load(16, self.seconds, self.every_s, self.prefix, self.suffix, prepare=True)
        return [*alone, beside]

    @property
    def tokens_cached(self) -> int:
        return len(self.loads()[-1].documents()) * (self.prefix + self.suffix)

    @property
    def tokens_in_gpu(self) -> int:
        return 16 * 4096 + 3 * (self.prefix + self.suffix)

    @property
    def longest(self) -> int:
        return self.prefix + self.suffix


@dataclass(frozen=True)
class Finding:
    """What one engine did: seconds until it was ready, and what each load took."""

    mode: str
    start_s: float
    served: list[Served]

    def row(self) -> list[str]:
        *alone, beside = self.served
        rates = [f"{percentile(served.gaps_ms, 0.5):.2f}" for served in alone]
        gaps = [f"{percentile(beside.gaps_ms, share):.1f}" for share in (0.5, 0.99, 1.0)]
        first = [f"{percentile(beside.ttft_ms, share):.1f}" for share in (0.5, 0.99)]
        speed = beside.decoded / beside.seconds if beside.seconds else 0.0
        cold = median(beside.cold_ms) if beside.cold_ms else float("nan")
        early = beside.cold_ms[0] if beside.cold_ms else float("nan")
        return [
            self.mode,
            f"{self.start_s:.1f}",
            *rates,
            f"{early:.0f}, {cold:.0f}",
            *first,
            *gaps,
            f"{speed:.0f}",
        ]


class Sized(Protocol):
    """What an engine is to be made for."""

    @property
    def eager(self) -> bool: ...

    @property
    def tokens_cached(self) -> int: ...

    @property
    def tokens_in_gpu(self) -> int: ...

    @property
    def longest(self) -> int: ...


def engine_arguments(mode: str, model: Path, shape: Shape, plan: Sized, folder: Path) -> dict[str, Any]:
    """vLLM's arguments for one of MODES."""
    host_gib = shape.kv_bytes(plan.tokens_cached) / 2**30 * 1.05 + 1
    arguments: dict[str, Any] = {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "max_model_len": plan.longest + 64,
        "max_num_batched_tokens": 16384,
        "max_num_seqs": 64,
        "kv_cache_memory_bytes": shape.kv_bytes(plan.tokens_in_gpu),
        "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": True,
        "enforce_eager": plan.eager,
        "disable_log_stats": True,
        "block_size": shape.block_size,
    }
    if mode == "native":
        arguments["kv_offloading_size"] = host_gib
    elif mode == "lmcache":
        settings = {"lmcache.local_cpu": True, "lmcache.max_local_cpu_size": host_gib}
        arguments["kv_transfer_config"] = _connector("LMCacheConnectorV1", settings)
    elif mode != "plain":
        settings = {"chunk_size": shape.chunk_size, **_lwkv_settings(mode, host_gib, folder)}
        transfer = _connector("LWKVConnector", settings)
        arguments["kv_transfer_config"] = {
            **transfer,
            "kv_connector_module_path": "lwkv.integrations.vllm",
        }
    return arguments


def _connector(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": settings}


def _lwkv_settings(mode: str, host_gib: float, folder: Path) -> dict[str, Any]:
    below = {"max_local_cpu_size": min(2.5, host_gib)}
    settings: dict[str, dict[str, Any]] = {
        "lwkv": {"max_local_cpu_size": host_gib},
        "lwkv-bulk": {"max_local_cpu_size": host_gib, "use_layerwise": False},
        "lwkv-disk": {**below, "local_disk": str(folder), "max_local_disk_size": host_gib},
        "lwkv-1000": {**below, "remote_url": "throttled://1000"},
        "lwkv-100": {**below, "remote_url": "throttled://100"},
    }
    return settings[mode]


class Engine:
    """A vLLM in a process of its own, and how long it took to start."""

    def __init__(
        self,
        mode: str,
        arguments: dict[str, Any],
        packages: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        begin = time.perf_counter()
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(packages)]))
        own = {"PYTHONPATH": path, **(environment or {})}
        self._child = Child(mode, "lwkv.benchmarks.vllm.load", arguments, own)
        self.start_s = time.perf_counter() - begin

    def serve(self, load: Load) -> Served:
        """Raises RuntimeError where the engine has died."""
        return Served(**self._child.ask(asdict(load)))

    def converse(self, conversations: Conversations) -> Conversed:
        """Raises RuntimeError where the engine has died."""
        found = self._child.ask(asdict(conversations))
        return Conversed(**found | {"turns": [tuple(turn) for turn in found["turns"]]})

    def close(self) -> None:
        self._child.close()


@contextmanager
def started(mode: str, shape: Shape, plan: Sized) -> Iterator[Engine]:
    """An engine that ends with the block, and its folders with it."""
    with tempfile.TemporaryDirectory() as folder:
        model, disk = Path(folder, "model"), Path(folder, "disk")
        model.mkdir()
        disk.mkdir()
        installed_in(Path(folder))
        write_model(model, shape, plan.longest)
        engine = Engine(mode, engine_arguments(mode, model, shape, plan, disk), Path(folder))
        try:
            yield engine
        finally:
            engine.close()


def measure(modes: Sequence[str], shape: Shape, plan: Plan) -> list[Finding]:
    findings = []
    for mode in modes:
        with started(mode, shape, plan) as engine:
            served = [engine.serve(load) for load in plan.loads()]
            findings.append(Finding(mode, engine.start_s, served))
    return findings


def faults(findings: Sequence[Finding], plan: Plan) -> list[str]:
    """First tokens that differ, and prompts that were computed though they were cached."""
    found = []
    for finding in findings:
        beside = finding.served[-1]
        if finding.mode != "plain":
            missed = sum(cached < plan.prefix for cached in beside.cached)
            found += [f"{finding.mode}: {missed} of {len(beside.cached)} prompts were not cached"] * (
                missed > 0
            )
        if sorted(beside.first_tokens) != sorted(findings[0].served[-1].first_tokens):
            found.append(f"{finding.mode}: first tokens differ from those of {findings[0].mode}")
    return found


def table(findings: Sequence[Finding], plan: Plan) -> str:
    """A row for each engine; milliseconds, but for the start and the speed."""
    heads = [
        "engine",
        "start, s",
        *(f"between tokens, batch {batch}" for batch in plan.batches),
        "cold: first, median",
        "TTFT p50",
        "p99",
        "between tokens p50",
        "p99",
        "most",
        "decoded tokens/s",
    ]
    rows = [heads, ["---"] * len(heads), *(finding.row() for finding in findings)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def write_result(output: Path, findings: Sequence[Any], wrong: Sequence[str], shown: str) -> int:
    """Write dataclasses as JSON into `output`, print what is shown and what is wrong; 1 if anything is."""
    result = {
        "command": sys.argv[1:],
        "versions": versions(),
        "faults": wrong,
        "findings": [asdict(finding) for finding in findings],
    }
    output.write_text(json.dumps(result))
    print(shown)
    print("\n".join(["", *(f"fault: {fault}" for fault in wrong)]))
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lwkv.benchmarks.vllm_serving",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="llama-8b", help="whose KV cache and layers"
    )
    parser.add_argument(
        "--engines", default=",".join(DEFAULT_MODES), help=f"by comma, some of {', '.join(MODES)}"
    )
    parser.add_argument("--prefix", type=int, default=8192, help="cached tokens of a prompt that arrives")
    parser.add_argument("--suffix", type=int, default=64, help="new tokens of a prompt that arrives")
    parser.add_argument("--every", type=float, default=0.25, metavar="S", help="seconds between two prompts")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long prompts arrive")
    parser.add_argument(
        "--batches", default="1,8,32", help="numbers of requests that decode without prompts, by comma"
    )
    parser.add_argument("--block-size", type=int, help="tokens of vLLM's blocks, if not as the shape says")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--output", type=Path, default=Path("vllm-serving.json"), help="file for the results")
    args = parser.parse_args()
    batches = [int(batch) for batch in args.batches.split(",")]
    plan = Plan(batches, args.seconds, args.every, args.prefix, args.suffix, args.eager)
    shape = SHAPES[args.shape]
    shape = replace(shape, block_size=args.block_size or shape.block_size)
    findings = measure(args.engines.split(","), shape, plan)
    wrong = faults(findings, plan)
    return write_result(args.output, findings, wrong, table(findings, plan))


if __name__ == "__main__":
    sys.exit(main())
