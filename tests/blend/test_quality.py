"""SmolLM2 comes nearer to full prefill by blending, and the better the choice, the nearer.

Some tasks of each kind, with fixed seeds; `benchmarks/blend_quality.py` is the longer evaluation. A figure
is the sum of the tasks' KL divergences from full prefill. docs/blending.md says which orders do not hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from demo_model import needs_smollm2

from lwkv.benchmarks.blend_quality import Way, measure
from lwkv.benchmarks.blending.tasks import cut_facts, needle, two_hops
from lwkv.blend import Deviation, NoTokens, QueryAttention, RandomTokens
from lwkv.cli.demo.blend.trial import Behind, Task, Trial
from lwkv.reference import load_smollm2

pytestmark = [needs_smollm2, pytest.mark.slow]
NEEDLES = range(4)
HOPS = range(4)
CUTS = range(4)
NUM_LAYERS = 30

REUSE = Way("reuse", NoTokens, 0.0, Behind.NOTHING)
SHARED = Way("shared", NoTokens, 0.0, Behind.TEXT)
UNMOVED = Way("unmoved", NoTokens, 0.0, Behind.NOTHING, moved=False)
RANDOM = Way("random", RandomTokens, 0.15, Behind.NOTHING)
LITTLE = Way("15 %", Deviation, 0.15, Behind.NOTHING)
MORE = Way("30 %", Deviation, 0.3, Behind.NOTHING)
LITTLE_UNMOVED = Way("15 %, unmoved", Deviation, 0.15, Behind.NOTHING, moved=False)
QUERY = Way("query", lambda: QueryAttention.of(NUM_LAYERS), 0.15, Behind.NOTHING)
QUERY_UNMOVED = Way("query, unmoved", QUERY.make, 0.15, Behind.NOTHING, moved=False)

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
    ways = (REUSE, SHARED, RANDOM, LITTLE, MORE, QUERY, QUERY_UNMOVED)
    return figures(trial, [needle(seed) for seed in NEEDLES], *ways)


@pytest.fixture(scope="module")
def hops(trial: Trial) -> Figures:
    return figures(trial, [two_hops(seed) for seed in HOPS], REUSE, UNMOVED, RANDOM, LITTLE, QUERY)


@pytest.fixture(scope="module")
def cuts(trial: Trial) -> Figures:
    return figures(trial, [cut_facts(seed) for seed in CUTS], LITTLE, LITTLE_UNMOVED)


def test_the_more_is_computed_the_nearer_it_comes(needles: Figures) -> None:
    assert needles["30 %"] < needles["15 %"] < needles["reuse"]
    assert needles["15 %"] <= 0.9 * needles["reuse"]
    assert needles["30 %"] <= 0.75 * needles["reuse"]


def test_facts_of_two_hops_come_nearer_too(hops: Figures) -> None:
    assert hops["15 %"] <= 0.9 * hops["reuse"]


def test_what_has_changed_most_is_a_better_choice_than_chance(needles: Figures, hops: Figures) -> None:
    assert needles["15 %"] < needles["random"]
    assert hops["15 %"] < hops["random"]


def test_the_default_shared_prefix_is_worth_as_much_as_blending(needles: Figures) -> None:
    assert needles["shared"] <= 0.6 * needles["reuse"]


def test_what_the_question_looks_at_is_a_better_choice_than_what_has_changed(
    needles: Figures, hops: Figures
) -> None:
    assert needles["query"] <= 0.75 * needles["15 %"]
    assert hops["query"] <= 0.75 * hops["15 %"]


def test_keys_that_are_not_moved_are_worse(hops: Figures) -> None:
    assert hops["reuse"] < hops["unmoved"]


def test_tokens_that_are_computed_again_need_moved_keys(needles: Figures, cuts: Figures) -> None:
    assert 1.5 * needles["query"] <= needles["query, unmoved"]
    assert 1.5 * cuts["15 %"] <= cuts["15 %, unmoved"]
