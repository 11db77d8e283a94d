"""Time to first token through SGLang: computed, from the device, from SGLang's HiCache, and from lwkv.

`python -m lwkv.benchmarks.sglang_ttft` needs SGLang 0.5.23 and a device. Weights are dummies: the times are
those of the shape. Engines run one after the other. Host hits are made as in a service: more prefixes are
visited in turn than the device's cache holds, so that it has dropped the one that comes next.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lwkv.benchmarks.measuring.child import Child
from lwkv.benchmarks.measuring.shapes import SHAPES, Shape
from lwkv.benchmarks.sglang.child import Answer
from lwkv.benchmarks.sglang.findings import Case, call_table, served_table, table
from lwkv.benchmarks.sglang.gates import find_gates, thread_table
from lwkv.benchmarks.sglang.load import (
    DECODED_PROMPT,
    DECODED_TOKENS,
    Load,
    Question,
    Served,
)
from lwkv.benchmarks.sglang.stalls import STALLS_SUFFIX, stall_table
from lwkv.benchmarks.vllm_ttft import write_model

MODES = ("plain", "hicache", "lwkv")
VARIANTS: dict[str, dict[str, Any]] = {
    "lwkv": {},
    "lwkv-two-streams": {"extra_config": {"load_streams": 2}},
    "lwkv-lossless": {"page_codec": "lossless"},
}
"""lwkv's settings in modes of its own: copies and kernels of loads with a stream each; fewer bytes."""
PAGE = 64
DEVICE_PROMPTS = 3
"""Prompts that the device's cache holds, beside the requests that decode."""
VOCABULARY = 128000
ON_THE_CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.2,
}
REST_S = 0.3


class Engine:
    """An SGLang in a process of its own."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        self.name = name
        self._child = Child(name, "lwkv.benchmarks.sglang.child", arguments, own_session=True)

    def ask(self, question: Question) -> Answer:
        """Raises RuntimeError where the engine has died."""
        # A GPU that has just worked hard is slower for a while.
        time.sleep(REST_S)
        return Answer(**self._child.ask(asdict(question)))

    def serve(self, load: Load) -> Served:
        """Raises RuntimeError where the engine has died."""
        return Served(**self._child.ask(asdict(load)))

    def close(self) -> None:
        self._child.close()


@dataclass(frozen=True)
class Plan:
    """What is measured: `repeats` prompts of each kind, `suffix` new tokens behind `prefix` cached ones.

    Then, with `decoders`, prompts that arrive every `every_s` seconds for `seconds` while so many decode.
    """

    prefix: int
    suffix: int
    repeats: int
    decoders: int = 0
    seconds: float = 8.0
    every_s: float = 0.4

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        decoded = DECODED_PROMPT + DECODED_TOKENS if self.decoders else 0
        return max(self.prefix + self.suffix, decoded)

    @property
    def device_tokens(self) -> int:
        """What SGLang has room for on the device."""
        pages = -(-DEVICE_PROMPTS * (self.prefix + self.suffix) // PAGE)
        return pages * PAGE + self.decoders * (DECODED_PROMPT + DECODED_TOKENS)

    @property
    def num_prefixes(self) -> int:
        """More than the device holds: visited in turn, each one is gone when it comes again."""
        return max(2 * DEVICE_PROMPTS, self.device_tokens // max(self.prefix, 1) + 1)

    def load(self) -> Load:
        return Load(
            self.decoders, self.seconds, self.every_s, self.prefix, self.suffix, self.num_prefixes + 2
        )

    def measure(self, engine: Engine, case: Case) -> None:
        """Every kind of prompt, on an engine that has just started."""
        for seed in range(2):  # kernels are built here
            engine.ask(self._question(9000, 9000 + seed))
        first = engine.ask(Question(0, 0, self.suffix, 9100, flush=True))
        assert first.from_device == 0
        self._run(engine, case, "suffix", [Question(0, 0, self.suffix, 100 + i) for i in range(self.repeats)])
        self._run(engine, case, "computed", [self._question(200 + i, 300 + i) for i in range(self.repeats)])
        engine.ask(self._question(400, 400, flush=True))
        self._run(engine, case, "device", [self._question(400, 401 + i) for i in range(self.repeats)])
        if case.mode != "plain":
            self._measure_host(engine, case)

    def serve(self, engine: Engine, case: Case) -> None:
        """Prompts beside requests that decode, if there are to be any."""
        if not self.decoders:
            return
        case.served = engine.serve(self.load())
        cached = self.prefix // PAGE * PAGE
        others = sum(tokens != cached for tokens in case.served.from_host)
        if case.mode != "plain" and others:
            count = len(case.served.from_host)
            case.faults.append(f"beside requests that decode, {others} of {count} prompts were not loaded")

    def _measure_host(self, engine: Engine, case: Case) -> None:
        prefixes = range(500, 500 + self.num_prefixes)
        computed = engine.ask(self._question(500, 600, flush=True))
        for prefix in prefixes[1:]:
            engine.ask(self._question(prefix, 600))
        time.sleep(1.0)  # what is stored behind the last answer
        loaded = engine.ask(self._question(500, 600))
        case.same = {"computed": _said(computed), "loaded": _said(loaded)}
        if case.same["computed"] != case.same["loaded"]:
            case.faults.append(f"a loaded prompt is answered {_said(loaded)}, computed {_said(computed)}")
        for seed in range(700, 700 + -(-self.repeats // len(prefixes))):
            # From the one behind the last one on: each was dropped before it comes again.
            self._run(engine, case, "host", [self._question(p, seed) for p in (*prefixes[1:], prefixes[0])])

    def _question(self, prefix_seed: int, suffix_seed: int, flush: bool = False) -> Question:
        return Question(self.prefix, prefix_seed, self.suffix, suffix_seed, flush)

    def _run(self, engine: Engine, case: Case, kind: str, questions: Sequence[Question]) -> None:
        for question in questions:
            answer = engine.ask(question)
            case.ms.setdefault(kind, []).append(answer.ms)
            cached = self.prefix // PAGE * PAGE
            wanted = {"device": (cached, 0), "host": (0, cached)}.get(kind, (0, 0))
            if (answer.from_device, answer.from_host) != wanted:
                got = f"{answer.from_device} tokens from the device and {answer.from_host} from the host"
                case.faults.append(f"{kind}: {got}, not {wanted[0]} and {wanted[1]}")


def _said(answer: Answer) -> tuple[int, float]:
    return answer.token, answer.logprob


def engine_arguments(
    mode: str,
    model: Path,
    shape: Shape,
    plan: Plan,
    host_gib: float,
    times: Path,
    graphs: bool = False,
    cpu: bool = False,
) -> dict[str, Any]:
    """SGLang's arguments for one of MODES or VARIANTS."""
    arguments: dict[str, Any] = {
        "model_path": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "attention_backend": "triton",
        "dtype": str(shape.dtype).removeprefix("torch."),
        "page_size": PAGE,
        "mem_fraction_static": 0.5,
        "max_total_tokens": plan.device_tokens,
        "context_length": plan.longest + 64,
        "chunked_prefill_size": 2 * plan.longest,
        "max_running_requests": plan.decoders + 8,
        "random_seed": 1,
        "log_level": "info",
        "vocabulary": VOCABULARY,
    }
    # Graphs of prefills are broken at attention, where the pool waits for its layers.
    if graphs:
        arguments["cuda_graph_bs_prefill"] = [plan.suffix]
        # Requests that decode are of no interest in themselves: a few graphs do.
        sizes = {1, plan.decoders // 2, plan.decoders} - {0}
        arguments |= (
            {"cuda_graph_bs_decode": sorted(sizes)} if plan.decoders else {"disable_decode_cuda_graph": True}
        )
    else:
        arguments["disable_cuda_graph"] = True
    if cpu:
        arguments |= ON_THE_CPU
    if mode == "hicache":
        arguments |= {
            "enable_hierarchical_cache": True,
            "hicache_size": int(host_gib),
            "hicache_write_policy": "write_through",
        }
    if mode in VARIANTS:
        settings = VARIANTS[mode]
        extra = {"reserve_gib": host_gib} | settings.get("extra_config", {})
        arguments |= {
            "enable_unified_cache_external_linker": True,
            "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": {
                "linker": "TimedLinker",
                "linker_module_path": "lwkv.benchmarks.sglang.timed_linker",
                "linker_extra_config": {
                    **settings,
                    "max_local_cpu_size": host_gib,
                    "extra_config": extra,
                    "times": str(times),
                },
            },
        }
    return arguments


def measure(mode: str, shape: Shape, plan: Plan, host_gib: float, **how: bool) -> Case:
    """Start one engine, and measure it; `how` are more arguments of `engine_arguments`."""
    case = Case(mode)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, shape, plan.longest)
        times = folder / "times.json"
        engine = Engine(mode, engine_arguments(mode, folder, shape, plan, host_gib, times, **how))
        try:
            plan.measure(engine, case)
            time.sleep(REST_S)  # the linker writes its times when nobody waits for it
            case.host_ms = _read_times(times)
            case.stalls = _read_times(times.with_name(times.name + STALLS_SUFFIX))
            plan.serve(engine, case)
            time.sleep(REST_S)
            case.host_ms_beside = _read_times(times)[len(case.host_ms) :]
        finally:
            engine.close()
    return case


def _read_times(times: Path) -> list[dict[str, float]]:
    found: list[dict[str, float]] = json.loads(times.read_text()) if times.exists() else []
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lwkv.benchmarks.sglang_ttft",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="llama-8b", help="whose KV cache and layers"
    )
    parser.add_argument("--prefix", type=int, default=8192, help="cached tokens")
    parser.add_argument("--suffix", type=int, default=256, help="new tokens")
    parser.add_argument("--repeats", type=int, default=6, help="runs of which a median is taken")
    parser.add_argument(
        "--modes",
        default=",".join(MODES),
        help=f"engines to measure, by comma; these, too: {', '.join(VARIANTS)}",
    )
    parser.add_argument(
        "--graphs", action="store_true", help="with SGLang's breakable CUDA graphs for prefills"
    )
    parser.add_argument("--cpu", action="store_true", help="on the CPU, to try it out")
    parser.add_argument(
        "--host-gib", type=float, default=16.0, help="GiB of host memory for lwkv, and for HiCache"
    )
    parser.add_argument("--decodes", type=int, default=0, help="requests that decode beside more prompts")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long prompts arrive beside them")
    parser.add_argument("--every", type=float, default=0.4, metavar="S", help="seconds between two of these")
    parser.add_argument("--output", type=Path, default=Path("sglang-ttft.json"), help="file for the results")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    plan = Plan(args.prefix, args.suffix, args.repeats, args.decodes, args.seconds, args.every)
    cases: list[Case] = []
    for mode in args.modes.split(","):
        cases.append(measure(mode, shape, plan, args.host_gib, graphs=args.graphs, cpu=args.cpu))
        found = {
            "command": sys.argv[1:],
            "versions": {name: _version(name) for name in ("sglang", "sglang-kernel", "torch")},
            "environment": {name: value for name, value in os.environ.items() if name.startswith("SGLANG_")},
            "cases": [asdict(case) for case in cases],
            "gates": [asdict(gate) | {"holds": gate.holds} for gate in find_gates(cases)],
        }
        # After every engine: a run that is interrupted leaves the results so far.
        args.output.write_text(json.dumps(found, indent=1))
    wrong = [f"{case.mode}, {fault}" for case in cases for fault in case.faults]
    stalls = "\n".join(filter(None, (stall_table(case.mode, case.stalls) for case in cases)))
    tables = (table(cases), thread_table(cases), call_table(cases), stalls, served_table(cases))
    gates = "\n".join(map(str, find_gates(cases)))
    print("\n\n".join(filter(None, (*tables, gates))))
    print("\n".join(["", *(f"fault: {fault}" for fault in wrong)]))
    return 1 if wrong else 0


def _version(package: str) -> str | None:
    try:
        return version(package)
    except ImportError:
        return None


if __name__ == "__main__":
    sys.exit(main())
