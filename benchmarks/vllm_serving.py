"""A vLLM that serves: requests decode while cached prompts arrive, with lwkv and without.

`python -m lwkv.benchmarks.vllm_serving` needs vLLM and a device. Engines run one after the other, each alone
on the device, or all at once, to which the same loads are given in turns. Weights are dummies: the times are
those of the shape. Reported are the time to first token of prompts that arrive alone and beside requests that
decode, the time between two tokens of these, decoded tokens a second, and conversations that do not fit GPU
memory. `python -m lwkv.benchmarks.vllm_report` makes a table and a picture of the results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from lwkv.benchmarks.measuring.shapes import Shape
from lwkv.benchmarks.vllm.conversations import Conversations, Conversed
from lwkv.benchmarks.vllm.engines import LWKV_MODES, MODES, Engine, Sized, parse_modes, started
from lwkv.benchmarks.vllm.load import Load, Served
from lwkv.benchmarks.vllm.options import parser_of, shape_of
from lwkv.benchmarks.vllm_report import SCHEMA, tables
from lwkv.benchmarks.vllm_ttft import versions

DEFAULT_MODES = ("plain", "native", "lwkv", "lwkv-bulk", "lwkv-disk")
ALONE, BESIDE = "alone", "beside"
ALONE_EVERY_S = 0.06
"""Often enough that the device stays at its full speed; longer for prompts of more than 8192 tokens."""
TOKENS_A_SECOND = 300
"""Of a request that decodes: no more, on any device so far."""


class Planned(Sized, Protocol):
    """What engines are given, by name and in this order, and conversations at last, if any."""

    @property
    def conversations(self) -> Conversations | None: ...

    def loads(self) -> Mapping[str, Load]: ...


@dataclass(frozen=True)
class Plan:
    """The loads that each engine gets.

    Attributes:
        batches: numbers of requests that decode with nothing beside them.
        seconds: how long prompts arrive beside 16 requests that decode; a fourth of that for `batches`.
        every_s: seconds between two of these prompts.
        prefix, suffix: tokens of them that are cached, and new ones.
        alone: how many prompts come one by one, with nothing beside them.
        alone_suffix: their new tokens.
        conversations: what is answered at last, if anything.
        host_gib: see Sized.
    """

    batches: Sequence[int]
    seconds: float
    every_s: float
    prefix: int
    suffix: int
    eager: bool = False
    alone: int = 0
    alone_suffix: int = 256
    conversations: Conversations | None = None
    host_gib: float | None = None

    def loads(self) -> dict[str, Load]:
        """By name, in their order."""
        loads = {
            decode_name(batch): Load(batch, self.seconds / 4, 0.0, self.prefix, self.suffix)
            for batch in self.batches
        }
        if self.alone:
            every_s = ALONE_EVERY_S * max(1.0, self.prefix / 8192)
            seconds = (self.alone + 0.5) * every_s
            loads[ALONE] = Load(0, seconds, every_s, self.prefix, self.alone_suffix, 500, True)
        loads[BESIDE] = Load(16, self.seconds, self.every_s, self.prefix, self.suffix, prepare=True)
        return loads

    @property
    def tokens_cached(self) -> int:
        """Of the load that has most; what the loads before it left behind is evicted."""
        counts = [len(load.documents()) * (load.prefix + load.suffix) for load in self.loads().values()]
        talks = self.conversations
        return max([*counts, talks.conversations * talks.longest if talks else 0])

    @property
    def tokens_in_gpu(self) -> int:
        """For the requests that decode and three prompts, or for the conversations that are answered."""
        decoded = max(load.decoders * most_decoded(load) for load in self.loads().values())
        talks = self.conversations
        return max(decoded + 3 * self.longest, (talks.at_once + 1) * talks.longest if talks else 0)

    @property
    def longest(self) -> int:
        loads, talks = self.loads().values(), self.conversations
        prompts = [max(load.prefix + load.suffix, most_decoded(load)) for load in loads]
        return max([*prompts, talks.longest if talks else 0])


def most_decoded(load: Load) -> int:
    """Tokens of a request that decodes, its prompt included, at most."""
    return 256 + int(TOKENS_A_SECOND * load.seconds) if load.decoders else 0


def decode_name(batch: int) -> str:
    return f"decode {batch}"


@dataclass(frozen=True)
class Finding:
    """What one engine did: seconds until it was ready, and what each of the plan's loads took, by name."""

    mode: str
    start_s: float
    served: dict[str, Served] = field(default_factory=dict)
    conversed: Conversed | None = None


def measure(modes: Sequence[str], shape: Shape, plan: Planned, at_once: bool = False) -> list[Finding]:
    """Start engines, one after the other or all at once, and give each load to all of those that run."""
    findings = []
    for group in [list(modes)] if at_once else [[mode] for mode in modes]:
        with started(group, shape, plan) as engines:
            findings += serve_in_turns(engines, plan)
    return findings


def serve_in_turns(engines: Sequence[Engine], plan: Planned) -> list[Finding]:
    findings = [Finding(engine.mode, engine.start_s) for engine in engines]
    for name, load in plan.loads().items():
        for engine, finding in zip(engines, findings, strict=True):
            finding.served[name] = engine.serve(load)
    if plan.conversations is None:
        return findings
    conversed = [engine.converse(plan.conversations) for engine in engines]
    return [replace(each, conversed=found) for each, found in zip(findings, conversed, strict=True)]


def faults(findings: Sequence[Finding], plan: Planned) -> list[str]:
    """First tokens that differ, and prompts that were computed though they were cached."""
    return [*_missed(findings, plan), *_different(findings)]


def _missed(findings: Sequence[Finding], plan: Planned) -> Iterator[str]:
    # What a slow tier has may be computed, where that is faster.
    for finding in findings:
        _, is_below = LWKV_MODES.get(finding.mode, ({}, finding.mode == "plain"))
        for name, served in finding.served.items() if not is_below else ():
            missed = sum(cached < plan.loads()[name].prefix for cached in served.cached)
            if missed:
                yield f"{finding.mode}, {name}: {missed} of {len(served.cached)} prompts were not cached"


def _different(findings: Sequence[Finding]) -> Iterator[str]:
    first = findings[0]
    for finding in findings:
        for name, served in finding.served.items():
            if sorted(served.first_tokens) != sorted(first.served[name].first_tokens):
                yield f"{finding.mode}, {name}: first tokens differ from those of {first.mode}"
        talks = [each.conversed.first_by_turn() for each in (first, finding) if each.conversed is not None]
        if talks and talks[0] != talks[-1]:
            yield f"{finding.mode}, conversations: first tokens differ from those of {first.mode}"


def write_result(output: Path, findings: Sequence[Finding], wrong: Sequence[str]) -> int:
    """Write what was found as JSON into `output`, print its tables and what is wrong; 1 if anything is."""
    result = {
        "schema": SCHEMA,
        "command": sys.argv[1:],
        "versions": versions(),
        "faults": wrong,
        "findings": [asdict(finding) for finding in findings],
    }
    output.write_text(json.dumps(_rounded(result)))
    print("\n".join([*tables(result), *(f"fault: {fault}" for fault in wrong)]))
    return 1 if wrong else 0


def _rounded(value: Any) -> Any:
    """Numbers with three digits behind the point: there is one for every decoded token."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


def main() -> int:
    parser = parser_of("vllm_serving", __doc__)
    parser.add_argument(
        "--engines", default=",".join(DEFAULT_MODES), help=f"by comma, some of {', '.join(MODES)}"
    )
    parser.add_argument("--prefix", type=int, default=8192, help="cached tokens of a prompt that arrives")
    parser.add_argument("--suffix", type=int, default=64, help="new tokens of a prompt that arrives")
    parser.add_argument("--every", type=float, default=0.25, metavar="S", help="seconds between two prompts")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long prompts arrive")
    parser.add_argument(
        "--batches",
        type=_numbers,
        default="1,8,32",
        help="numbers of requests that decode without prompts, by comma",
    )
    parser.add_argument("--alone", type=int, default=8, help="prompts that come one by one, or none")
    parser.add_argument("--alone-suffix", type=int, default=256, help="new tokens of these")
    parser.add_argument("--conversations", type=int, default=0, help="conversations that follow, or none")
    parser.add_argument("--turns", type=int, default=5, help="turns of each conversation")
    parser.add_argument(
        "--host-gib", type=float, help="host memory of each engine, if not as much as is needed"
    )
    parser.add_argument(
        "--at-once",
        action="store_true",
        help="start all engines at the same time, which needs memory for all; each gets a load in turns",
    )
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    args = parser.parse_args()
    talks = Conversations(args.conversations, args.turns, args.prefix, 448, 16, 4)
    plan = Plan(
        batches=args.batches,
        seconds=args.seconds,
        every_s=args.every,
        prefix=args.prefix,
        suffix=args.suffix,
        eager=args.eager,
        alone=args.alone,
        alone_suffix=args.alone_suffix,
        conversations=talks if args.conversations else None,
        host_gib=args.host_gib,
    )
    findings = measure(parse_modes(args.engines), shape_of(args), plan, args.at_once)
    return write_result(args.output, findings, faults(findings, plan))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


if __name__ == "__main__":
    sys.exit(main())
