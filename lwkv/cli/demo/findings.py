"""What the runs of the demo show, as plain values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from lwkv.cli.demo.play import CHUNK_SIZE, Results
from lwkv.cli.demo.stage import Run
from lwkv.reference import QUESTIONS, Tokenizer
from lwkv.telemetry.timeline import hidden_and_exposed


@dataclass(frozen=True, slots=True)
class Setting:
    """What the demo ran on."""

    platform: str
    why: str
    device: str
    kernels: str
    threads: int
    model: str
    dtype: str
    num_layers: int
    chunk_size: int
    repeats: int


@dataclass(frozen=True, slots=True)
class AnswerFound:
    """A question with its answer by full recompute and by the cache, in text and token ids."""

    question: str
    answer: str
    tokens: list[int]
    recomputed_tokens: list[int]
    num_prompt: int
    num_loaded: int
    num_computed: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Times to first token of `num_runs` equal runs, in seconds, and the load times of the median run.

    `load_hidden` was covered by compute; for `load_exposed` the model waited.
    """

    num_runs: int
    median: float
    fastest: float
    slowest: float
    load_hidden: float
    load_exposed: float


@dataclass(frozen=True, slots=True)
class DemoFindings:
    """All that is reported.

    `num_stored`, `num_hit` and `num_retrieved` are tokens: stored by the cold run, found by the look-up, and
    retrieved by the warm run as the cache engine counts. `logit_drift` is the largest difference between
    logits with loaded and with computed KV; `closest_choice` the smallest lead of a chosen token's logit over
    the next best: greedy answers are stable while the drift is less than half of it. `spoiled_answer` and
    `spoiled_drift` belong to a run with one loaded block spoiled. A drift is None if it is not a number.
    """

    setting: Setting
    answers: list[AnswerFound]
    num_stored: int
    num_hit: int
    num_retrieved: int
    cold: Timing
    bulk: Timing
    layerwise: Timing
    logit_drift: float | None
    closest_choice: float
    spoiled_answer: str
    spoiled_drift: float | None
    faults: list[str]
    files: list[str] = field(default_factory=list)


def sum_up(setting: Setting, results: Results, tokenizer: Tokenizer) -> DemoFindings:
    """Compare and add up."""
    warm = results.by_layers_answer
    plain = results.recomputed[1]
    answered = zip(QUESTIONS, (results.cold[0], warm), results.recomputed, strict=True)
    return DemoFindings(
        setting,
        [_answer(question, run, wanted, tokenizer) for question, run, wanted in answered],
        num_stored=results.cold[0].num_stored * CHUNK_SIZE,
        num_hit=results.num_hit,
        num_retrieved=warm.num_retrieved,
        cold=time_runs(results.cold),
        bulk=time_runs(results.in_bulk, whole=True),
        layerwise=time_runs(results.by_layers),
        logit_drift=_drift(warm, plain),
        closest_choice=min(_lead(run.logits) for run in results.recomputed),
        spoiled_answer=tokenizer.decode(results.spoiled.answer.tokens).strip(),
        spoiled_drift=_drift(results.spoiled, plain),
        faults=list(_faults(results)),
    )


def median_run(runs: Sequence[Run]) -> Run:
    """The run whose time to first token is the median."""
    return sorted(runs, key=lambda run: run.answer.first_token_s)[len(runs) // 2]


def time_runs(runs: Sequence[Run], whole: bool = False) -> Timing:
    """Sum up the times of equal runs; `whole` if the model waited for all layers before the first."""
    times = [run.answer.first_token_s for run in runs]
    middle = median_run(runs)
    spans = [replace(span, layer=0) if whole and span.lane == "load" else span for span in middle.spans]
    load = hidden_and_exposed(spans)
    return Timing(
        len(runs), middle.answer.first_token_s, min(times), max(times), load.hidden_s, load.exposed_s
    )


def _answer(question: str, run: Run, recomputed: Run, tokenizer: Tokenizer) -> AnswerFound:
    found = run.answer
    return AnswerFound(
        question,
        tokenizer.decode(found.tokens).strip(),
        found.tokens,
        recomputed.answer.tokens,
        found.num_prompt,
        found.num_loaded,
        found.num_computed,
    )


def _drift(run: Run, other: Run) -> float | None:
    """The largest difference of logits, up to where the answers part; None where one is not a number."""
    pairs = list(zip(run.answer.tokens, other.answer.tokens, strict=False))
    steps = next((i for i, (a, b) in enumerate(pairs, 1) if a != b), len(pairs))
    largest = float((run.logits[:steps] - other.logits[:steps]).abs().max())
    return largest if math.isfinite(largest) else None


def _lead(logits: Tensor) -> float:
    best = logits.topk(2, dim=-1).values
    return float((best[:, 0] - best[:, 1]).min())


def _faults(results: Results) -> Iterator[str]:
    first, second = results.recomputed
    yield from _differences("first question, cold", results.cold[0], results.cold[1:], first)
    loaded = {
        "by layers": (results.by_layers_answer, results.by_layers),
        "in bulk": (results.in_bulk_answer, results.in_bulk),
    }
    for how, (run, timed) in loaded.items():
        yield from _differences(f"second question, loaded {how}", run, timed, second)
        if not run.num_retrieved == run.answer.num_loaded == results.num_hit > 0:
            yield (
                f"second question, loaded {how}: {results.num_hit} tokens were found in the cache, the cache "
                f"engine counts {run.num_retrieved} as retrieved, and {run.answer.num_loaded} were used"
            )
    if results.spoiled.answer.tokens == second.answer.tokens and _drift(results.spoiled, second) == 0:
        yield "with a loaded block spoiled the logits stay the same: they do not depend on what was loaded"


def _differences(what: str, run: Run, timed: Sequence[Run], recomputed: Run) -> Iterator[str]:
    """Compare a whole answer and the first tokens of `timed` with full recompute."""
    wanted = recomputed.answer.tokens
    if run.answer.tokens != wanted:
        yield f"{what}: the tokens are {run.answer.tokens}, by full recompute {wanted}"
    wrong = [other.answer.tokens[0] for other in timed if other.answer.tokens[0] != wanted[0]]
    if wrong:
        yield f"{what}: the first token was {wrong[0]} in {len(wrong)} runs, by full recompute {wanted[0]}"
