"""How near blends come to full prefill with a real model: needles, look-alikes, two hops and cut facts.

Run as `python -m lwkv.benchmarks.blend_quality --tasks 24`. A task takes about a minute of one core.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import torch

from lwkv.benchmarks.bench.findings import table
from lwkv.benchmarks.blending.tasks import cut_facts, look_alikes, needle, two_hops
from lwkv.blend import Deviation, FirstTokens, NoTokens, QueryAttention, RandomTokens, Selector
from lwkv.cli.demo.arguments import add_model_arguments, load_chosen
from lwkv.cli.demo.blend.play import ANSWER, QUESTION
from lwkv.cli.demo.blend.play import documents as demo_documents
from lwkv.cli.demo.blend.trial import Behind, Task, Trial
from lwkv.platforms import detect_platform

KINDS: Mapping[str, Callable[[int], Task]] = {
    "needles": needle,
    "look-alikes": look_alikes,
    "two hops": two_hops,
    "cut facts": cut_facts,
}
UNMOVED = ("plain reuse", "deviation of V, 15 %", "query, 15 %")
NUM_ANSWER, LONGEST = 8, 2400


@dataclass(frozen=True, slots=True)
class Way:
    """One way to blend: what documents are computed `behind`, and whether keys are `moved`."""

    name: str
    make: Callable[[], Selector]
    share: float
    behind: Behind
    moved: bool = True


@dataclass(slots=True)
class Measured:
    """One way over all tasks: KL divergence and process time over a full prefill's, a figure a task."""

    kl: list[float] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)


def ways(num_layers: int) -> list[Way]:
    """All that is compared, for documents computed behind nothing and behind either shared prefix."""

    def query() -> Selector:
        return QueryAttention.of(num_layers)

    selectors: list[tuple[str, Callable[[], Selector], float]] = [
        ("plain reuse", NoTokens, 0.0),
        ("random, 15 %", RandomTokens, 0.15),
        ("first of each, 15 %", FirstTokens, 0.15),
        ("deviation of V, 15 %", Deviation, 0.15),
        ("deviation of K, 15 %", lambda: Deviation("k"), 0.15),
        ("gradual, 15 %", lambda: Deviation("v", (1, 2), (0.25, 0.15)), 0.15),
        ("deviation of V, 30 %", Deviation, 0.3),
        ("query, 5 %", query, 0.05),
        ("query, 15 %", query, 0.15),
    ]
    found = []
    for behind in Behind:
        found += [Way(*item, behind) for item in selectors]
        found += [
            Way(f"{name}, keys not moved", make, share, behind, moved=False)
            for name, make, share in selectors
            if name in UNMOVED
        ]
    return found


def measure(trial: Trial, tasks: Sequence[Task], compared: Sequence[Way]) -> list[Measured]:
    """Run every task by full prefill, and in every way."""
    found = [Measured() for _ in compared]
    for task in tasks:
        trial.begin(task)
        for behind in dict.fromkeys(way.behind for way in compared):
            trial.encode(behind)
        for way, measured in zip(compared, found, strict=True):
            outcome = trial.blend(way.make(), way.share, behind=way.behind, moved=way.moved)
            measured.kl.append(outcome.kl)
            measured.cost.append(outcome.process_s / trial.full_process_s)
    return found


def measure_cost(trial: Trial, repeats: int = 3) -> tuple[int, float]:
    """Tokens of a long prompt, and the process time of a blend at 15 % over that of its full prefill.

    Documents are the demo's, twice: the head and the question are to be a small part of the prompt.
    """
    documents = demo_documents()
    again = [f"A second copy. {text}" for text in documents]
    task = Task((*documents, *again), QUESTION, "", ANSWER)
    full = []
    for _ in range(2):
        trial.begin(task)
        full.append(trial.full_process_s)
    trial.encode()
    blended = [trial.blend(Deviation(), 0.15).process_s for _ in range(repeats)]
    return len(trial.tokens), median(blended) / min(full)


def difference(one: Sequence[float], other: Sequence[float], draws: int = 10_000) -> tuple[float, float]:
    """The middle 95 % of the mean of `one` less `other`, over tasks drawn again and again."""
    gaps = np.array(one) - np.array(other)
    means = np.random.default_rng(0).choice(gaps, (draws, len(gaps))).mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def lines(kind: str, compared: Sequence[Way], found: Sequence[Measured]) -> Iterator[str]:
    """The table of one kind of task."""
    yield f"{kind}: mean KL divergence from full prefill in nats, {len(found[0].kl)} tasks"
    rows = []
    for behind in Behind:
        mine = [(way, item) for way, item in zip(compared, found, strict=True) if way.behind is behind]
        base = next(item for way, item in mine if way.name == "deviation of V, 15 %")
        for way, item in mine:
            low, high = difference(item.kl, base.kl)
            rows.append(
                [
                    f"{way.name}, {behind.value}",
                    f"{np.mean(item.kl):.4f}",
                    f"{low:+.3f} to {high:+.3f}",
                    f"{median(item.cost):.2f}",
                ]
            )
    yield from table(["", "KL", "less deviation of V, 95 %", "process time over full"], rows)
    yield ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run all, print the tables, and write every figure to a JSON file."""
    parser = argparse.ArgumentParser(prog="blend_quality", description=__doc__)
    add_model_arguments(parser, "blend-quality-output")
    parser.add_argument(
        "--tasks", type=int, default=24, metavar="N", help="tasks of each of the four kinds (24)"
    )
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        metavar="N",
        help="seed of the first task, the next have the next seeds (0)",
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    platform = detect_platform(args.platform)
    named = load_chosen(platform, args)
    trial = Trial(named.model, named.tokenizer, num_answer=NUM_ANSWER, longest=LONGEST, platform=platform)
    compared = ways(named.model.shape.num_layers)
    report: dict[str, object] = {"model": named.name, "tasks": args.tasks, "first": args.first}
    for kind, make in KINDS.items():
        tasks = [make(seed) for seed in range(args.first, args.first + args.tasks)]
        found = measure(trial, tasks, compared)
        print("\n".join(lines(kind, compared, found)), flush=True)
        report[kind] = {
            f"{way.name}, {way.behind.value}": asdict(item) for way, item in zip(compared, found, strict=True)
        }
    num_tokens, cost = measure_cost(trial)
    print(f"deviation of V, 15 %, of a prompt of {num_tokens} tokens: process time over full {cost:.2f}")
    report["cost"] = {"tokens": num_tokens, "ratio": cost}
    trial.close()
    _write(args.output, report)
    return 0


def _write(folder: Path, report: Mapping[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "blend_quality.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
