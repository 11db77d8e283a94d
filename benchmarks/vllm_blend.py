"""Time to first token of blended prompts in vLLM, and what they cost requests that decode.

`python -m lwkv.benchmarks.vllm_blend` needs vLLM and a device. Engines run one after the other, each in a
process of its own and alone on the device. Weights are dummies: the times are those of the shape.

A prompt has `--documents` of `--tokens` each, cached in host memory, and `--question` other tokens. Reported
are medians in milliseconds, beside a full prefill. For blends also loading alone, and the blend's own
computing with all loads in place: the larger of the two is what a blend takes at least.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from lwkv.benchmarks.shapes import SHAPES, Shape
from lwkv.benchmarks.vllm_ttft import Plan as TtftPlan
from lwkv.benchmarks.vllm_ttft import engine_arguments, versions, write_model

MODES = ("plain", "blend", "reuse")
"""A full prefill without lwkv; a blend with `--share`; the same with nothing computed again."""
WARM_UPS = 3
PREFIX = list(range(100, 120))
DECODING = 16


@dataclass(frozen=True)
class Plan:
    """What is measured: prompts by their sizes in tokens, and for how long others decode beside them."""

    documents: int
    tokens: int
    question: int
    share: float
    repeats: int
    seconds: float
    every_s: float
    eager: bool

    @property
    def reused(self) -> int:
        return self.documents * self.tokens

    def prompt(self, turn: int, vocabulary: int) -> tuple[list[int], list[list[int]]]:
        """The documents in the order of a turn, a token behind each; head and question are the turn's own."""
        order = np.random.default_rng(turn).permutation(self.documents)
        ids, segments = _drawn(90_000 + turn, 3, vocabulary), []
        for number in order:
            segments.append([len(ids), len(ids) + self.tokens])
            ids += [*_drawn(1000 + int(number), self.tokens, vocabulary), 3]
        return ids + _drawn(50_000 + turn, self.question, vocabulary), segments

    def rows(self, shape: Shape) -> int:
        """The length of a prompt of which vLLM computes as many rows as a blend does."""
        full = 2 / shape.num_layers
        return int(self.reused * (full + (1 - full) * self.share)) + self.question


@dataclass
class Found:
    """What one engine did; times in milliseconds."""

    mode: str
    ttft_ms: list[float] = field(default_factory=list)
    load_ms: list[float] = field(default_factory=list)
    compute_ms: list[float] = field(default_factory=list)
    between_ms: list[float] = field(default_factory=list)
    beside: str = ""
    counts: dict[str, float] = field(default_factory=dict)

    def summary(self) -> dict[str, float | str]:
        """Medians, and the 99th percentile between tokens."""
        times = {"ttft": self.ttft_ms, "load": self.load_ms, "compute": self.compute_ms}
        row: dict[str, float | str] = {name: round(median(ms), 2) for name, ms in times.items() if ms}
        if self.load_ms:
            larger = max(median(self.load_ms), median(self.compute_ms))
            row["over_larger"] = round(median(self.ttft_ms) / larger, 3)
        if self.between_ms:
            row["between_p50"], row["between_p99"] = (
                round(float(np.percentile(self.between_ms, share)), 2) for share in (50, 99)
            )
        return {"mode": self.mode, **row, "beside": self.beside}


class Child:
    """One engine, in this process."""

    def __init__(self, mode: str, shape: Shape, plan: Plan, model: Path, host_gib: float) -> None:
        from vllm import LLM

        longest = plan.reused + plan.question + 64
        sizes = TtftPlan([longest], 64, 1)
        arguments = engine_arguments("plain" if mode == "plain" else "lwkv", model, shape, sizes, host_gib)
        arguments |= {"max_num_seqs": 256, "enforce_eager": plan.eager, "gpu_memory_utilization": 0.8}
        arguments["kv_cache_memory_bytes"] = shape.kv_bytes(4 * longest + DECODING * 2048)
        if mode != "plain":
            share = 0.0 if mode == "reuse" else plan.share
            settings = {
                "enable_blending": True,
                "blend_recompute_ratios": share,
                "blend_shared_prefix": PREFIX,
                "load_when": "always",
            }
            arguments["kv_transfer_config"]["kv_connector_extra_config"] |= settings
            module = "lwkv.integrations.vllm.blending.worker_extension"
            arguments["worker_extension_cls"] = f"{module}.NoteModel"
        self.llm = LLM(**arguments)
        self.mode, self.plan, self.shape = mode, plan, shape
        self.vocabulary = self.llm.llm_engine.model_config.get_vocab_size()
        self._number = 0

    def run(self) -> Found:
        """Measure everything."""
        found = Found(self.mode)
        for turn in range(WARM_UPS + self.plan.repeats):
            # Nothing of the prompt is in the device's own cache.
            assert self.llm.reset_prefix_cache()
            time.sleep(0.3)
            ms = self._ttft(*self.plan.prompt(turn, self.vocabulary))
            if self.mode != "plain" and turn == 0:
                self._settle()
            if turn >= WARM_UPS:
                found.ttft_ms.append(ms)
        if self.mode != "plain":
            self._measure_parts(found)
        self._measure_beside(found)
        if self.mode != "plain":
            stats = self._blending().engine_stats()
            found.counts = {name: count for name, count in stats.items() if name.startswith("blend_")}
        return found

    def _ttft(self, ids: list[int], segments: list[list[int]]) -> float:
        begin = time.perf_counter()
        self.llm.generate([{"prompt_token_ids": ids}], self._parameters(1, segments), use_tqdm=False)
        return 1e3 * (time.perf_counter() - begin)

    def _parameters(self, max_tokens: int, segments: list[list[int]]) -> Any:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": {"lwkv_segments": segments}}
        return SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=extra
        )

    def _settle(self) -> None:
        """Have the scheduler know what is in host memory."""
        assert self._blending().flush()
        self._ttft([5] * 8, [])

    def _blending(self) -> _Parts:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return _Parts(get_kv_transfer_group()._worker._blending)

    def _measure_parts(self, found: Found) -> None:
        """A blend's loading and computing, each alone."""
        parts = self._blending()
        order = parts.next_order(lambda: self._ttft(*self.plan.prompt(10_000, self.vocabulary)))
        for turn in range(WARM_UPS + self.plan.repeats):
            load, compute = parts.load_ms(order), parts.compute_ms(order)
            if turn >= WARM_UPS:
                found.load_ms.append(load)
                found.compute_ms.append(compute)
        assert self.llm.reset_prefix_cache()

    def _measure_beside(self, found: Found) -> None:
        """Requests that decode while prompts arrive: blended ones, or as many rows of plain prefill."""
        rows = self.plan.rows(self.shape)
        found.beside = f"{rows} tokens of prefill" if self.mode == "plain" else "blended prompts"
        engine = self.llm.llm_engine
        for number in range(DECODING):
            ids = _drawn(70_000 + number, 32, self.vocabulary)
            self._add(ids, 1800, [])
        begin, next_at, turn = time.perf_counter(), 1.0, 20_000
        last: dict[str, float] = {}
        while (now := time.perf_counter() - begin) < self.plan.seconds:
            if now >= next_at:
                next_at, turn = next_at + self.plan.every_s, turn + 1
                ids, segments = self.plan.prompt(turn, self.vocabulary)
                if self.mode == "plain":
                    ids, segments = _drawn(turn, rows, self.vocabulary), []
                self._add(ids, 1, segments)
            for output in engine.step():
                at = time.perf_counter()
                if output.request_id in last and now > 1.0:
                    found.between_ms.append(1e3 * (at - last[output.request_id]))
                last[output.request_id] = at
        names = [f"one-{number}" for number in range(self._number)]
        engine.abort_request(names)

    def _add(self, ids: list[int], max_tokens: int, segments: list[list[int]]) -> None:
        name, self._number = f"one-{self._number}", self._number + 1
        parameters = self._parameters(max_tokens, segments)
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": ids}, parameters)


class _Parts:
    """A worker's half of blending, taken apart."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def flush(self) -> bool:
        return bool(self._worker._segments.engine.flush())

    def engine_stats(self) -> dict[str, float]:
        stats: dict[str, float] = self._worker._segments.engine.stats()
        return stats

    def next_order(self, ask: Any) -> Any:
        """The order of the prompt that `ask` has blended."""
        orders: list[Any] = []
        blend = self._worker._blend

        def note(order: Any, loads: Any) -> Any:
            orders.append(order)
            return blend(order, loads)

        self._worker._blend = note
        ask()
        self._worker._blend = blend
        (order,) = orders
        return order

    def load_ms(self, order: Any) -> float:
        """All loads of a blend, with nothing computed."""
        segments = self._worker._segments
        self._synchronize()
        begin = time.perf_counter()
        retrieval = segments.retrieval(self._worker._loads(order))
        retrieval.hold()
        retrieval.open()
        retrieval.finish()
        self._synchronize()
        return 1e3 * (time.perf_counter() - begin)

    def compute_ms(self, order: Any) -> float:
        """A blend whose loads are in place."""
        from lwkv.blend.segment_cache import lay_out
        from lwkv.integrations.vllm.blending.blend_pass import BlendPass
        from lwkv.integrations.vllm.blending.worker import _prompt

        worker = self._worker
        loads = worker._loads(order)
        with_counts = [load.num_tokens - load.request.first for load in loads]
        layout = lay_out(_prompt(order, order.end), loads, with_counts)
        selector = worker._selector
        self._synchronize()
        begin = time.perf_counter()
        worker.is_running = True
        BlendPass(worker._layers, worker._rows, layout, selector, selector.shares[-1]).run(lambda _: None)
        worker.is_running = False
        self._synchronize()
        return 1e3 * (time.perf_counter() - begin)

    def _synchronize(self) -> None:
        import torch

        if torch.accelerator.is_available():
            torch.accelerator.synchronize()


def _drawn(seed: int, length: int, vocabulary: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(200, vocabulary, length).tolist()
    return found


def measured(modes: Sequence[str], arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What each engine found, in a process of its own. Raises RuntimeError where one has died."""
    for mode in modes:
        with tempfile.NamedTemporaryFile(suffix=".json") as result:
            command = [sys.executable, "-m", "lwkv.benchmarks.vllm_blend", *arguments]
            command += ["--child", mode, "--output", result.name]
            if subprocess.run(command, check=False).returncode:
                raise RuntimeError(f"the engine {mode!r} has ended; what it said is above")
            yield json.loads(Path(result.name).read_text())


def child(args: argparse.Namespace, shape: Shape, plan: Plan) -> None:
    """Measure one engine, and write what was found."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), shape, plan.reused + plan.question + 2000)
        found = Child(args.child, shape, plan, Path(folder), args.host_gib).run()
    args.output.write_text(json.dumps(asdict(found) | {"summary": found.summary()}))


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m lwkv.benchmarks.vllm_blend", description=__doc__)
    options.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    options.add_argument("--documents", type=int, default=8)
    options.add_argument("--tokens", type=int, default=1024, help="of each document")
    options.add_argument("--question", type=int, default=64, help="other tokens")
    options.add_argument("--share", type=float, default=0.15)
    options.add_argument("--repeats", type=int, default=11)
    options.add_argument("--seconds", type=float, default=6.0, help="with requests that decode")
    options.add_argument("--every", type=float, default=0.25, help="seconds between prompts beside them")
    options.add_argument("--block-size", type=int, help="tokens of vLLM's blocks, if not as the shape says")
    options.add_argument("--graphs", action="store_true", help="with vLLM's CUDA graphs and compilation")
    options.add_argument("--modes", default=",".join(MODES), help=f"some of {', '.join(MODES)}")
    options.add_argument("--host-gib", type=float, default=8.0)
    options.add_argument("--output", type=Path, default=Path("vllm-blend.json"))
    options.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    return options


def main() -> int:
    args = parser().parse_args()
    shape = SHAPES[args.shape]
    shape = replace(shape, block_size=args.block_size or shape.block_size)
    plan = Plan(
        *(args.documents, args.tokens, args.question, args.share, args.repeats, args.seconds, args.every),
        eager=not args.graphs,
    )
    if args.child:
        child(args, shape, plan)
        return 0
    found = list(measured(args.modes.split(","), sys.argv[1:]))
    args.output.write_text(
        json.dumps({"command": sys.argv[1:], "versions": versions(), "engines": found}, indent=1)
    )
    for one in found:
        print(json.dumps(one["summary"]))
    plain = [median(one["ttft_ms"]) for one in found if one["mode"] == "plain"]
    for one in found if plain else ():
        print(f"{one['mode']}: {median(one['ttft_ms']) / plain[0]:.3f} of a full prefill")
    return 0


if __name__ == "__main__":
    sys.exit(main())
