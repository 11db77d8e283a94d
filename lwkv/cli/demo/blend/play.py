"""What the blend demo runs: one question over three documents that were cached one by one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lwkv.blend import Deviation, FirstTokens, NoTokens, QueryAttention, RandomTokens, Selector
from lwkv.cli.demo.blend.trial import BlendOutcome, Task, Trial
from lwkv.cli.demo.progress import Tick
from lwkv.reference import read_document

NUM_ANSWER = 16
QUESTION, ANSWER = "What does a yellow flag mean?", "doctor"
SHARES = (0.0, 0.05, 0.15, 0.3, 0.5, 1.0)
SHARE = 0.15
# The chapters of the handbook that make up each document; cached as they stand here, asked in another order.
_CHAPTERS = ((0, 1, 2), (3, 4, 5), (6, 7, 8, 9))
ORDER = (2, 0, 1)


@dataclass(frozen=True, slots=True)
class WayFound:
    """One way to the answer: numbers of tokens, seconds, KL divergence in nats, and what it said.

    `share` is the part of the reused tokens that was computed again. The time is a median of several runs.
    """

    name: str
    share: float
    num_computed: int
    first_token_s: float
    kl: float
    answer: str


@dataclass(frozen=True, slots=True)
class Curve:
    """KL divergence from full prefill for each of SHARES."""

    name: str
    kl: list[float]


@dataclass(frozen=True, slots=True)
class BlendFindings:
    """All that is reported. Documents are in `order` in the prompt, and were cached in order of number."""

    platform: str
    model: str
    dtype: str
    question: str
    order: list[int]
    num_prompt: int
    num_reused: int
    ways: list[WayFound]
    curves: list[Curve]
    faults: list[str]
    files: list[str] = field(default_factory=list)


def documents() -> list[str]:
    """The handbook's chapters, as three documents."""
    _, *chapters = read_document().split("\n\n")
    return ["\n\n".join(chapters[i].strip() for i in numbers) for numbers in _CHAPTERS]


def demo_task() -> Task:
    """The demo's question, over the documents in another order than that in which they are cached."""
    cached = documents()
    return Task(tuple(cached[i] for i in ORDER), QUESTION, "", ANSWER)


def selectors(num_layers: int) -> dict[str, Callable[[], Selector]]:
    """The ways to choose what is computed again, by name."""
    return {
        "deviation": Deviation,
        "query": lambda: QueryAttention.of(num_layers),
        "prefix_k": FirstTokens,
        "random": RandomTokens,
    }


def prepare(trial: Trial, tick: Tick) -> None:
    """Compute the demo's question in full, and cache its documents; `tick` is called after each."""
    trial.begin(demo_task())
    tick(1)
    trial.encode()
    tick(1)


def play(trial: Trial, repeats: int, tick: Tick) -> tuple[list[WayFound], list[Curve], list[str]]:
    """Run every way of a trial that is prepared; `tick` is called after each run."""
    chosen = selectors(trial.model.shape.num_layers)
    full = WayFound(
        "full prefill",
        1.0,
        len(trial.tokens),
        trial.full_s,
        0.0,
        trial.tokenizer.decode(trial.answer).strip(),
    )
    ways = [full, _way(trial, "plain reuse", NoTokens(), 0.0, repeats, tick)]
    for name in ("deviation", "query"):
        ways.append(_way(trial, f"blend by {name}", chosen[name](), SHARE, repeats, tick))
    curves = [
        Curve(name, [_run(trial, make(), share, tick).kl for share in SHARES])
        for name, make in chosen.items()
    ]
    return ways, curves, list(_faults(ways, curves))


def num_runs(repeats: int) -> int:
    """How often `play` calls its tick."""
    return 3 * repeats + 4 * len(SHARES)


def _run(trial: Trial, selector: Selector, share: float, tick: Tick) -> BlendOutcome:
    outcome = trial.blend(selector, share)
    tick(1)
    return outcome


def _way(trial: Trial, name: str, selector: Selector, share: float, repeats: int, tick: Tick) -> WayFound:
    outcomes = [_run(trial, selector, share, tick) for _ in range(repeats)]
    last = outcomes[-1]
    found = last.blended
    return WayFound(
        name,
        found.num_chosen / max(found.num_reused, 1),
        found.num_chosen + found.num_computed,
        statistics.median(outcome.first_token_s for outcome in outcomes),
        last.kl,
        trial.say(last),
    )


def _faults(ways: Sequence[WayFound], curves: Sequence[Curve]) -> list[str]:
    """What is wrong: where everything is computed a blend is a full prefill."""
    wrong = [
        f"{curve.name}: with everything computed the answer is {curve.kl[-1]:.2g} nats from full prefill"
        for curve in curves
        if curve.name != "prefix_k" and not curve.kl[-1] < 1e-2
    ]
    if not all(way.kl >= 0 for way in ways):
        wrong.append("a KL divergence is not a number")
    return wrong
