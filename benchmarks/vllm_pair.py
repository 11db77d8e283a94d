"""Two vLLMs on one host memory, beside two with half of it each.

`python -m lwkv.benchmarks.vllm_pair --devices 0,1` needs vLLM and two devices. With `--devices 0,0` both
engines share one: the cached share is the same, but times are not those of two. Conversations take turns,
and each turn is answered by one of the engines, drawn anew, as by a router that knows no caches. Weights are
dummies: the times are those of the shape. Reported are the share of prompt tokens that were cached, the
time to first token, and answers a second of both engines together.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lwkv.benchmarks.measuring.owner import owner_of
from lwkv.benchmarks.measuring.shapes import Shape
from lwkv.benchmarks.vllm.conversations import Conversations, Conversed
from lwkv.benchmarks.vllm.engines import Engine, engine_arguments
from lwkv.benchmarks.vllm.options import parser_of, shape_of
from lwkv.benchmarks.vllm_conversations import Plan
from lwkv.benchmarks.vllm_serving import Finding, faults, write_result
from lwkv.benchmarks.vllm_ttft import write_model
from lwkv.platforms import detect_platform

MODES = ("two pools", "one owner")
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK", "musa": "MUSA_VISIBLE_DEVICES"}
"""The variable by which a process sees some devices only, for each kind."""


@dataclass(frozen=True)
class Pair:
    """What is measured: conversations on two engines, and the host memory of both together.

    Attributes:
        devices: one for each engine, which may be the same.
        together: start the engines of both modes at the same time: each device has twice as many meanwhile.
        share_in_host: of all tokens of the conversations.
    """

    shape: Shape
    plan: Plan
    devices: Sequence[str]
    share_in_host: float
    together: bool = False

    @property
    def engines_a_device(self) -> int:
        """At the same time, at most."""
        return max(Counter(self.devices).values()) * (len(MODES) if self.together else 1)

    @property
    def gib(self) -> float:
        return self.shape.kv_bytes(int(self.share_in_host * self.plan.tokens_cached)) / 2**30

    def rounds(self) -> Iterator[list[Conversations]]:
        """For each turn, what each engine answers: it is the same in both modes."""
        talks, drawn = self.plan.conversations, random.Random(0)
        for turn in range(talks.turns):
            engine_of = [drawn.randrange(len(self.devices)) for _ in range(talks.conversations)]
            yield [
                replace(
                    talks, only=[(talk, turn) for talk, engine in enumerate(engine_of) if engine == number]
                )
                for number in range(len(self.devices))
            ]


def measure(pair: Pair) -> list[Finding]:
    """Start the engines of each mode, and give both modes the same conversations, one after the other."""
    if not pair.together:
        findings = []
        for mode in MODES:
            with engines(mode, pair) as both:
                findings.append(_converse(mode, pair, both))
        return findings
    with ExitStack() as undo, ThreadPoolExecutor(len(MODES)) as threads:
        starts = [threads.submit(undo.enter_context, engines(mode, pair)) for mode in MODES]
        return [
            _converse(mode, pair, both)
            for mode, both in [(mode, start.result()) for mode, start in zip(MODES, starts, strict=True)]
        ]


def _converse(mode: str, pair: Pair, both: Sequence[Engine]) -> Finding:
    conversed = Conversed()
    with ThreadPoolExecutor(len(both)) as threads:
        for each in pair.rounds():
            _add(conversed, list(threads.map(Engine.converse, both, each)))
    return Finding(mode, max(engine.start_s for engine in both), {}, conversed)


@contextmanager
def engines(mode: str, pair: Pair) -> Iterator[list[Engine]]:
    """The engines of one mode, started at the same time; they end with the block."""
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory()))
        write_model(folder, pair.shape, pair.plan.longest)
        memory: dict[str, Any] = {"max_local_cpu_size": pair.gib / len(pair.devices)}
        if mode == MODES[1]:
            path, _ = undo.enter_context(owner_of(pair.gib))
            memory = {"host_memory": path}
        arguments = engine_arguments("lwkv", folder, pair.shape, pair.plan, folder, pair.engines_a_device)
        settings = arguments["kv_transfer_config"]["kv_connector_extra_config"]
        del settings["max_local_cpu_size"]
        settings |= memory | {"load_when": "always"}
        variable = VISIBLE.get(detect_platform().device_type)

        def started(device: str) -> Engine:
            engine = Engine(mode, arguments, folder, {variable: device} if variable else None)
            undo.callback(engine.close)
            return engine

        with ThreadPoolExecutor(len(pair.devices)) as threads:
            both = list(threads.map(started, pair.devices))
        yield both


def _add(conversed: Conversed, found: Sequence[Conversed]) -> None:
    """Add what the engines answered at the same time."""
    for one in found:
        for name in ("turns", "ttft_ms", "cached", "prompts", "first_tokens"):
            getattr(conversed, name).extend(getattr(one, name))
    conversed.seconds += max(one.seconds for one in found)


def main() -> int:
    parser = parser_of("vllm_pair", __doc__)
    parser.add_argument("--devices", default="0,1", help="one for each engine, by comma")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=5, help="turns of each conversation")
    parser.add_argument("--first", type=int, default=4096, help="tokens of the first prompt")
    parser.add_argument("--more", type=int, default=1024, help="tokens by which each prompt is longer")
    parser.add_argument("--answer", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--at-once", type=int, default=4, help="prompts that an engine answers at a time")
    parser.add_argument("--in-gpu", type=float, default=0.1, help="share of all tokens in a device's memory")
    parser.add_argument(
        "--in-host", type=float, default=0.9, help="share of all tokens in the host memory of both engines"
    )
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs: a start takes less time")
    parser.add_argument(
        "--together", action="store_true", help="start the engines of both modes at the same time"
    )
    args = parser.parse_args()
    counts = (args.conversations, args.turns, args.first, args.more, args.answer, args.at_once)
    plan = Plan(Conversations(*counts), args.in_gpu, args.eager)
    findings = measure(Pair(shape_of(args), plan, args.devices.split(","), args.in_host, args.together))
    return write_result(args.output, findings, faults(findings, plan))


if __name__ == "__main__":
    sys.exit(main())
