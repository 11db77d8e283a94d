"""A vLLM that answers conversations whose KV does not fit the GPU's memory, with lwkv and without.

`python -m lwkv.benchmarks.vllm_conversations` needs vLLM and a device. Engines run one after the other, each
alone on the device. Each turn's prompt is that of the turn before and some tokens more. Weights are dummies:
the times are those of the shape. Reported are the time to first token, the share of prompt tokens that were
cached, and answers a second.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lwkv.benchmarks.measuring.shapes import SHAPES
from lwkv.benchmarks.measuring.timing import percentile
from lwkv.benchmarks.vllm.conversations import Conversations, Conversed
from lwkv.benchmarks.vllm_serving import MODES, started, write_result

DEFAULT_MODES = ("plain", "lwkv", "native")


@dataclass(frozen=True)
class Plan:
    """The conversations, and the share of their tokens that fits the GPU's memory."""

    conversations: Conversations
    share_in_gpu: float
    eager: bool = False

    @property
    def longest(self) -> int:
        return self.conversations.longest

    @property
    def tokens_cached(self) -> int:
        return self.conversations.conversations * self.longest

    @property
    def tokens_in_gpu(self) -> int:
        least = (self.conversations.at_once + 1) * self.longest
        return max(least, int(self.share_in_gpu * self.tokens_cached))


@dataclass(frozen=True)
class Finding:
    """What one engine did."""

    mode: str
    start_s: float
    conversed: Conversed

    def row(self) -> list[str]:
        found = self.conversed
        later = [ms for (_, turn), ms in zip(found.turns, found.ttft_ms, strict=True) if turn]
        return [
            self.mode,
            *(f"{percentile(later, share):.1f}" for share in (0.5, 0.99)),
            f"{sum(found.cached) / sum(found.prompts):.2f}",
            f"{len(found.turns) / found.seconds:.2f}",
        ]


def measure(modes: Sequence[str], shape: Any, plan: Plan) -> list[Finding]:
    findings = []
    for mode in modes:
        with started(mode, shape, plan) as engine:
            findings.append(Finding(mode, engine.start_s, engine.converse(plan.conversations)))
    return findings


def faults(findings: Sequence[Finding]) -> list[str]:
    """Engines with other first tokens than the first engine."""
    tokens = [dict(zip(f.conversed.turns, f.conversed.first_tokens, strict=True)) for f in findings]
    return [
        f"{finding.mode}: first tokens differ from those of {findings[0].mode}"
        for finding, own in zip(findings, tokens, strict=True)
        if own != tokens[0]
    ]


def table(findings: Sequence[Finding]) -> str:
    """A row for each engine; times in milliseconds, of all turns but the first."""
    heads = ["engine", "TTFT p50", "p99", "cached share of all prompts", "answers/s"]
    rows = [heads, ["---"] * len(heads), *(finding.row() for finding in findings)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lwkv.benchmarks.vllm_conversations", description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--engines", default=",".join(DEFAULT_MODES), help=f"some of {', '.join(MODES)}")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=5, help="turns of each conversation")
    parser.add_argument("--first", type=int, default=8192, help="tokens of the first prompt")
    parser.add_argument("--more", type=int, default=448, help="tokens by which each prompt is longer")
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--at-once", type=int, default=4, help="prompts that are answered at a time")
    parser.add_argument("--in-gpu", type=float, default=0.3, help="share of the tokens that fits its memory")
    parser.add_argument("--output", type=Path, default=Path("vllm-conversations.json"))
    args = parser.parse_args()
    counts = (args.conversations, args.turns, args.first, args.more, args.answer, args.at_once)
    findings = measure(args.engines.split(","), SHAPES[args.shape], Plan(Conversations(*counts), args.in_gpu))
    return write_result(args.output, findings, faults(findings), table(findings))


if __name__ == "__main__":
    sys.exit(main())
