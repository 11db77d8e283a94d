"""SmolLM2 comes nearer to full prefill by blending, and the better the choice, the nearer.

The numbers are those of fixed seeds; `benchmarks/blend_quality.py` has the longer evaluation. KL divergences
are sums over the tasks, so that a task that is easy for all counts little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from demo_model import needs_smollm2

from lwkv.benchmarks.blend_quality import Way, measure
from lwkv.benchmarks.blend_tasks import needle, two_hops
from lwkv.blend import Deviation, NoTokens, QueryAttention, RandomTokens
from lwkv.demo.blend_trial import Task, Trial
from lwkv.reference import load_smollm2

pytestmark = needs_smollm2
SEEDS = range(10, 14)
NUM_LAYERS = 30

REUSE = Way("reuse", NoTokens, 0.0, shared=False)
SHARED = Way("shared", NoTokens, 0.0, shared=True)
UNMOVED = Way("unmoved", NoTokens, 0.0, shared=False, moved=False)
RANDOM = Way("random", RandomTokens, 0.15, shared=False)
LITTLE = Way("15 %", Deviation, 0.15, shared=False)
MORE = Way("30 %", Deviation, 0.3, shared=False)
QUERY = Way("query", lambda: QueryAttention.of(NUM_LAYERS), 0.15, shared=False)

Figures = dict[str, float]


@pytest.fixture(scope="module")
def trial() -> Iterator[Trial]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = Trial(*load_smollm2(), num_answer=8, longest=1000)
    yield made
    made.close()
    torch.set_num_threads(threads)


def figures(trial: Trial, tasks: Sequence[Task], *ways: Way) -> Figures:
    found = measure(trial, tasks, ways)
    return {way.name: sum(item.kl) for way, item in zip(ways, found, strict=True)}


@pytest.fixture(scope="module")
def needles(trial: Trial) -> Figures:
    tasks = [needle(seed) for seed in SEEDS]
    return figures(trial, tasks, REUSE, SHARED, UNMOVED, RANDOM, LITTLE, MORE, QUERY)


@pytest.fixture(scope="module")
def hops(trial: Trial) -> Figures:
    tasks = [two_hops(seed) for seed in SEEDS]
    return figures(trial, tasks, REUSE, UNMOVED, RANDOM, LITTLE, MORE, QUERY)


@pytest.fixture(params=["needles", "hops"])
def kl(request: pytest.FixtureRequest) -> Figures:
    found: Figures = request.getfixturevalue(request.param)
    return found


def test_the_more_is_computed_the_nearer_it_comes(kl: Figures) -> None:
    assert kl["30 %"] < kl["15 %"] < kl["reuse"]
    assert kl["15 %"] <= 0.9 * kl["reuse"]
    assert kl["30 %"] <= 0.75 * kl["reuse"]


def test_what_has_changed_most_is_a_better_choice_than_chance(kl: Figures) -> None:
    assert kl["15 %"] < kl["random"]


def test_what_the_question_looks_at_is_a_better_choice_than_what_has_changed(kl: Figures) -> None:
    assert kl["query"] <= 0.75 * kl["15 %"]


def test_keys_that_are_not_moved_are_worse(needles: Figures) -> None:
    assert needles["reuse"] < needles["unmoved"]


def test_a_shared_beginning_is_worth_as_much_as_blending(needles: Figures) -> None:
    assert needles["shared"] <= 0.6 * needles["reuse"]
