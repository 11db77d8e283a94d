"""A vLLM that answers conversations whose KV does not fit the GPU's memory, with lwkv and without.

`python -m lwkv.benchmarks.vllm_conversations` needs vLLM and a device. Each turn's prompt is that of the turn
before and some tokens more. Weights are dummies: the times are those of the shape. Reported are the time to
first token, the share of prompt tokens that were cached, and answers a second.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from lwkv.benchmarks.vllm.conversations import Conversations
from lwkv.benchmarks.vllm.engines import MODES, parse_modes
from lwkv.benchmarks.vllm.load import Load
from lwkv.benchmarks.vllm.options import parser_of, shape_of
from lwkv.benchmarks.vllm_serving import faults, measure, write_result

DEFAULT_MODES = ("plain", "lwkv", "native")


@dataclass(frozen=True)
class Plan:
    """The conversations, and the share of their tokens that fits the GPU's memory."""

    conversations: Conversations
    share_in_gpu: float
    eager: bool = False
    host_gib: float | None = None

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

    def loads(self) -> Mapping[str, Load]:
        return {}


def main() -> int:
    parser = parser_of("vllm_conversations", __doc__)
    parser.add_argument(
        "--engines", default=",".join(DEFAULT_MODES), help=f"by comma, some of {', '.join(MODES)}"
    )
    parser.add_argument("--conversations", type=int, default=24, help="how many take turns")
    parser.add_argument("--turns", type=int, default=5, help="turns of each conversation")
    parser.add_argument("--first", type=int, default=8192, help="tokens of the first prompt")
    parser.add_argument("--more", type=int, default=448, help="tokens by which each prompt is longer")
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--running", type=int, default=4, help="prompts that are answered at a time")
    parser.add_argument("--in-gpu", type=float, default=0.3, help="share of the tokens that fits its memory")
    parser.add_argument("--host-gib", type=float, help="host memory, if not as much as is needed")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--at-once", action="store_true", help="start all engines at the same time")
    args = parser.parse_args()
    counts = (args.conversations, args.turns, args.first, args.more, args.answer, args.running)
    plan = Plan(Conversations(*counts), args.in_gpu, args.eager, args.host_gib)
    findings = measure(parse_modes(args.engines), shape_of(args), plan, args.at_once)
    return write_result(args.output, findings, faults(findings, plan))


if __name__ == "__main__":
    sys.exit(main())
