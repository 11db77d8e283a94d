"""Time to first token of blended prompts in vLLM, and what they cost requests that decode.

`python -m lwkv.benchmarks.vllm_blend` needs vLLM and a device. Two engines run one after the other, each in a
process of its own and alone on the device: one without lwkv, and one that blends, with each selector in
turn. With `--at-once` both are started at the same time, and measured one after the other. Weights are
dummies: the times are those of the shape.

A prompt has `--documents` of `--tokens` each, cached in host memory, and `--question` other tokens. Reported
are medians in milliseconds, beside a full prefill. For blends also loading alone, and the time to first token
with all loads in place: the larger of the two is what a blend takes at least. Then it says of every gate
whether it holds.

With `--ranks` 2 or more, tensor parallel: loading and computing alone are not measured. Instead it is checked
that all ranks have computed the same rows, and that prompts of which all tokens are computed again have the
log-probabilities of vLLM's own answer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from lwkv.benchmarks.measuring.shapes import SHAPES, Shape
from lwkv.benchmarks.vllm.blend_gates import Found, gates
from lwkv.benchmarks.vllm.blend_parts import Parts
from lwkv.benchmarks.vllm.blend_ranks import EXTENSION, MOST_APART, AllRanks, apart
from lwkv.benchmarks.vllm_ttft import Plan as TtftPlan
from lwkv.benchmarks.vllm_ttft import engine_arguments, versions, write_model
from lwkv.blend import Deviation, FirstTokens, NoTokens, QueryAttention, Selector

ENGINES = ("plain", "blending")
WARM_UPS = 3
PREFIX = list(range(100, 120))
DECODING = 16

# Token ids, and where the documents are.
Prompt: TypeAlias = "tuple[list[int], list[list[int]]]"


def selectors(share: float, num_layers: int) -> dict[str, Selector]:
    """The ways to choose, by their names; `reuse` computes nothing again."""
    return {
        "deviation": Deviation("v", (1,), (share,)),
        "gradual": Deviation("v", (1, 2), (min(share + 0.1, 1.0), share)),
        "query": QueryAttention.of(num_layers),
        "prefix_k": FirstTokens(),
        "reuse": NoTokens(),
    }


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
    ranks: int = 1

    @property
    def reused(self) -> int:
        return self.documents * self.tokens

    def prompt(self, turn: int, vocabulary: int, first_document: int = 1000) -> Prompt:
        """The documents in the order of a turn, a token behind each; head and question are the turn's own."""
        order = np.random.default_rng(turn).permutation(self.documents)
        ids, segments = _drawn(90_000 + turn, 3, vocabulary), []
        for number in order:
            segments.append([len(ids), len(ids) + self.tokens])
            ids += [*_drawn(first_document + int(number), self.tokens, vocabulary), 3]
        return ids + _drawn(50_000 + turn, self.question, vocabulary), segments

    def rows(self, selector: Selector, num_layers: int) -> int:
        """The length of a prompt of which vLLM computes as many rows as a blend does."""
        if isinstance(selector, NoTokens):
            return self.question
        asking = selector.layer + 1 if isinstance(selector, QueryAttention) else 0
        part = _mean_share(selector, num_layers) if isinstance(selector, Deviation) else self.share
        return int(self.reused * part + self.question * asking / num_layers) + self.question


def _mean_share(selector: Deviation, num_layers: int) -> float:
    """Of the reused tokens, the part that is computed, as the mean over the layers."""
    ends = [*selector.layers, num_layers]
    shares = [1.0, *selector.shares]
    starts = [0, *ends[:-1]]
    layers = (share * (b - a) for share, a, b in zip(shares, starts, ends, strict=True))
    return sum(layers) / num_layers


class Child:
    """One engine, in this process."""

    def __init__(
        self,
        name: str,
        shape: Shape,
        plan: Plan,
        model: Path,
        host_gib: float,
        num_engines: int,
        in_parts: bool,
    ) -> None:
        from vllm import LLM

        longest = plan.reused + plan.question + 64
        sizes = TtftPlan([longest], 64, 1, ranks=plan.ranks)
        arguments = engine_arguments("plain" if name == "plain" else "lwkv", model, shape, sizes, host_gib)
        arguments |= {
            "max_num_seqs": 256,
            "enforce_eager": plan.eager,
            "gpu_memory_utilization": 0.8 / num_engines,
        }
        arguments["kv_cache_memory_bytes"] = shape.kv_bytes(4 * longest + DECODING * 2048)
        if name != "plain":
            settings = {
                "enable_blending": True,
                # Its model is tried for all selectors, and the scheduler's half asks.
                "blend_selector": "query",
                "blend_recompute_ratios": plan.share,
                "blend_shared_prefix": PREFIX,
                "blend_in_parts": in_parts,
                "load_when": "always",
            }
            arguments["kv_transfer_config"]["kv_connector_extra_config"] |= settings
            arguments["worker_extension_cls"] = EXTENSION
        self.llm = LLM(**arguments)
        self.plan, self.shape = plan, shape
        self.vocabulary = self.llm.llm_engine.model_config.get_vocab_size()
        self._number = 0

    def run_plain(self, rows: Sequence[int]) -> Found:
        """A full prefill, and requests beside prefills of so many tokens."""
        found = Found(ttft_ms=self._ttfts())
        for number in rows:
            found.beside_ms[str(number)], _ = self._beside(partial(self._plain, length=number))
        return found

    def run(self, name: str, selector: Selector) -> Found:
        """Blends with one selector. All documents are encoded with the first prompt of the engine."""
        return self.run_selector(selector) if self.plan.ranks == 1 else self.run_ranks(name, selector)

    def run_ranks(self, name: str, selector: Selector) -> Found:
        """As `run_selector`, with workers in other processes, and what is wrong with what ranks compute."""
        ranks = AllRanks(self.llm)
        share = 0.0 if isinstance(selector, NoTokens) else self.plan.share
        ranks.select(name, share)
        rows, before = self.plan.rows(selector, self.shape.num_layers), ranks.counts()
        found = Found(ttft_ms=self._ttfts(), rows=rows)
        found.counts = _grown(before, ranks.counts())
        self._require_blends(found)
        found.faults += ranks.faults(WARM_UPS + self.plan.repeats)
        found.beside_ms[str(rows)], found.ttft_beside_ms = self._beside(self._prompt)
        return found

    def check_answers(self, found: Found) -> None:
        """Compare blends of which all tokens, or none, are computed again with what vLLM computes itself."""
        ranks, turn = AllRanks(self.llm), 40_000
        ranks.fill(1)
        # Documents that were never cached: others were computed with other weights.
        ids, segments = self.plan.prompt(turn, self.vocabulary, first_document=2000)
        self._ttft(*self.plan.prompt(turn + 1, self.vocabulary, first_document=2000))
        assert ranks.flush()
        self._ttft([5] * 8, [])
        answers = {}
        for name, share in (("deviation", 1.0), ("reuse", 0.0)):
            ranks.select(name, share)
            assert self.llm.reset_prefix_cache()
            answers[name] = self._logprobs(ids, segments)
            found.faults += ranks.faults(1)
        # Last: from then on all of the prompt is cached as it is.
        own = self._logprobs(ids, [])
        apart_by = {name: apart(own, answer) for name, answer in answers.items()}
        found.counts |= {f"logprobs_apart_{name}": most for name, most in apart_by.items()}
        if not apart_by["deviation"] <= MOST_APART:
            found.faults.append(
                f"all computed again: log-probabilities differ by {apart_by['deviation']:.3g}"
            )

    def _logprobs(self, ids: list[int], segments: list[list[int]]) -> dict[int, float]:
        """Of the best first tokens of the answer."""
        parameters = self._parameters(1, segments)
        parameters.logprobs = 10
        (answer,) = self.llm.generate([{"prompt_token_ids": ids}], parameters, use_tqdm=False)
        return {token: one.logprob for token, one in answer.outputs[0].logprobs[0].items()}

    def run_selector(self, selector: Selector) -> Found:
        """As `run`, with the worker in this process."""
        parts = Parts()
        parts.select(selector, 0.0 if isinstance(selector, NoTokens) else self.plan.share)
        rows = self.plan.rows(selector, self.shape.num_layers)
        before = parts.counts()
        found = Found(ttft_ms=self._ttfts(), rows=rows)
        found.counts = _grown(before, parts.counts())
        with parts.loads_in_place():
            found.in_place_ms = self._ttfts()
        self._require_blends(found)
        self._measure_parts(found, parts)
        found.beside_ms[str(rows)], found.ttft_beside_ms = self._beside(self._prompt)
        for _ in range(self.plan.repeats):
            found.rest_ms.append(self._ttft(*self._plain(60_000 + self._next(), self.plan.question)))
        return found

    def encode(self) -> None:
        """Have all documents cached, and known to be."""
        self._ttft(*self._prompt(30_000))
        assert (Parts() if self.plan.ranks == 1 else AllRanks(self.llm)).flush()
        self._ttft([5] * 8, [])

    def _require_blends(self, found: Found) -> None:
        blended, asked = found.counts.get("blend_requests", 0), WARM_UPS + self.plan.repeats
        if blended != asked:
            found.faults.append(f"{blended:g} of {asked} prompts were blended")
        if failed := found.counts.get("blend_failures", 0):
            found.faults.append(f"{failed:g} blends failed; the log says why")

    def _ttfts(self) -> list[float]:
        taken = []
        for turn in range(WARM_UPS + self.plan.repeats):
            # Nothing of the prompt is in the device's own cache.
            assert self.llm.reset_prefix_cache()
            time.sleep(0.3)
            taken.append(self._ttft(*self._prompt(turn)))
        return taken[WARM_UPS:]

    def _prompt(self, turn: int) -> Prompt:
        return self.plan.prompt(turn, self.vocabulary)

    def _plain(self, turn: int, length: int) -> Prompt:
        return _drawn(turn, length, self.vocabulary), []

    def _next(self) -> int:
        self._number += 1
        return self._number

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

    def _measure_parts(self, found: Found, parts: Parts) -> None:
        """A blend's loading and computing, each alone."""
        order = parts.next_order(lambda: self._ttft(*self._prompt(10_000 + self._next())))
        for turn in range(WARM_UPS + self.plan.repeats):
            load, compute = parts.load_ms(order), parts.compute(order)
            if turn >= WARM_UPS:
                found.load_ms.append(load)
                found.compute_ms.append(compute.ms)
                found.queued_ms.append(compute.queued_ms)
        found.counts["rows_per_layer"] = compute.row_layers / self.shape.num_layers
        assert self.llm.reset_prefix_cache()

    def _beside(self, prompt: Callable[[int], Prompt]) -> tuple[list[float], list[float]]:
        """Times between tokens of requests that decode, and of prompts that arrive to their first token."""
        engine, names, came, ttfts = self.llm.llm_engine, [], dict[str, float](), []
        # Drawn ahead: a client does that elsewhere.
        prompts = [
            prompt(20_000 + self._next()) for _ in range(int(self.plan.seconds / self.plan.every_s) + 1)
        ]
        for _ in range(DECODING):
            names.append(self._add(1800, *self._plain(70_000 + self._next(), 32)))
        begin, next_at, taken = time.perf_counter(), 1.0, []
        last: dict[str, float] = {}
        while (now := time.perf_counter() - begin) < self.plan.seconds:
            if now >= next_at:
                next_at += self.plan.every_s
                names.append(self._add(1, *prompts.pop()))
                came[names[-1]] = time.perf_counter()
            for output in engine.step():
                at = time.perf_counter()
                if output.request_id in came:
                    ttfts.append(1e3 * (at - came.pop(output.request_id)))
                    continue
                if output.request_id in last and now > 1.0:
                    taken.append(1e3 * (at - last[output.request_id]))
                last[output.request_id] = at
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()
        return taken, ttfts

    def _add(self, max_tokens: int, ids: list[int], segments: list[list[int]]) -> str:
        name = f"one-{self._next()}"
        parameters = self._parameters(max_tokens, segments)
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": ids}, parameters)
        return name


def _grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: count - before.get(name, 0) for name, count in after.items()}


def _drawn(seed: int, length: int, vocabulary: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(200, vocabulary, length).tolist()
    return found


def measured(names: Sequence[str], arguments: Sequence[str], at_once: bool) -> Iterator[tuple[str, Found]]:
    """What each engine found, in a process of its own. Raises RuntimeError where one has died."""
    for group in [list(names)] if at_once else [[name] for name in names]:
        with tempfile.TemporaryDirectory() as folder:
            yield from _of_group(group, arguments, Path(folder))


def _of_group(names: Sequence[str], arguments: Sequence[str], folder: Path) -> Iterator[tuple[str, Found]]:
    """Start engines together; they find each other by files in `folder`, and leave there what they found."""
    command = [sys.executable, "-m", "lwkv.benchmarks.vllm_blend", *arguments, "--engines", ",".join(names)]
    children = {
        name: subprocess.Popen([*command, "--child", name, "--output", str(folder / name)]) for name in names
    }
    try:
        while any(one.poll() is None for one in children.values()):
            for name, one in children.items():
                if one.poll():
                    raise RuntimeError(f"the engine {name!r} has ended; what it said is above")
            time.sleep(0.1)
    finally:
        for one in children.values():
            one.kill()
            one.wait()
    for name in names:
        for key, found in json.loads((folder / name).read_text()).items():
            yield key, Found(**found)


def wait_for_turn(name: str, names: Sequence[str], folder: Path) -> None:
    """Wait until all engines have started, and those before this one have been measured."""
    (folder / f"{name}.started").touch()
    before = [folder / f"{other}.started" for other in names]
    before += [folder / other for other in names[: names.index(name)]]
    while not all(path.exists() for path in before):
        time.sleep(0.1)


def child(args: argparse.Namespace, shape: Shape, plan: Plan) -> None:
    """Measure one engine, and write what was found."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    known = selectors(plan.share, shape.num_layers)
    wanted = {name: known[name] for name in args.selectors}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), shape, plan.reused + plan.question + 2000)
        names = args.engines.split(",")
        sizes = shape, plan, Path(folder), args.host_gib
        engine = Child(args.child, *sizes, num_engines=len(names), in_parts=args.in_parts)
        wait_for_turn(args.child, names, args.output.parent)
        if args.child == "plain":
            rows = dict.fromkeys(plan.rows(selector, shape.num_layers) for selector in wanted.values())
            found = {"plain": engine.run_plain(list(rows))}
        else:
            engine.encode()
            found = {name: engine.run(name, selector) for name, selector in wanted.items()}
            if plan.ranks > 1:
                engine.check_answers(found[args.selectors[-1]])
    # Whole from the moment that it is there: the next engine waits for it.
    whole = args.output.with_suffix(".whole")
    whole.write_text(json.dumps({name: asdict(one) for name, one in found.items()}))
    whole.rename(args.output)


def _names(text: str) -> list[str]:
    known, names = list(selectors(0.15, 2)), text.split(",")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    return names


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
    options.add_argument(
        "--graphs",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with vLLM's CUDA graphs and compilation, as vllm serve runs",
    )
    known = list(selectors(0.15, 2))
    options.add_argument(
        "--selectors", type=_names, default=known, help=f"by comma, some of {', '.join(known)}"
    )
    options.add_argument("--engines", default=",".join(ENGINES), help=f"some of {', '.join(ENGINES)}")
    options.add_argument("--at-once", action="store_true", help="start all engines at the same time")
    options.add_argument(
        "--in-parts",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="do blends beside other requests in parts, one a step",
    )
    options.add_argument("--ranks", type=int, default=1, help="of tensor parallelism, each on a device")
    options.add_argument("--host-gib", type=float, default=8.0)
    options.add_argument("--output", type=Path, default=Path("vllm-blend.json"))
    options.add_argument("--child", choices=ENGINES, help=argparse.SUPPRESS)
    return options


def report(found: dict[str, Found]) -> str:
    """Every summary, then every gate and every fault."""
    lines = [json.dumps({"selector": name, **one.summary()}) for name, one in found.items()]
    lines += [f"{name}: {json.dumps(one.counts)}" for name, one in found.items() if one.counts]
    lines += map(str, gates(found))
    lines += [f"FAULT: {name}: {fault}" for name, one in found.items() for fault in one.faults]
    return "\n".join(lines)


def main() -> int:
    """Returns 1 where a gate does not hold, or something went wrong."""
    args = parser().parse_args()
    shape = SHAPES[args.shape]
    shape = replace(shape, block_size=args.block_size or shape.block_size)
    plan = Plan(
        *(args.documents, args.tokens, args.question, args.share, args.repeats, args.seconds, args.every),
        eager=not args.graphs,
        ranks=args.ranks,
    )
    if args.child:
        child(args, shape, plan)
        return 0
    found = dict(measured(args.engines.split(","), sys.argv[1:], args.at_once))
    engines = {name: asdict(one) | {"summary": one.summary()} for name, one in found.items()}
    verdicts = [gate._asdict() | {"holds": gate.holds} for gate in gates(found)]
    result = {"command": sys.argv[1:], "versions": versions(), "selectors": engines, "gates": verdicts}
    args.output.write_text(json.dumps(result, indent=1))
    print(report(found))
    is_wrong = any(one.faults for one in found.values()) or not all(one["holds"] for one in verdicts)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
