"""Which tokens are chosen, by place, by change and by attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from blend.conftest import Bench, prompt
from hypothesis import given
from hypothesis import strategies as st

from lwkv.blend import AllTokens, BlendRequest, Deviation, FirstTokens, NoTokens, QueryAttention, RandomTokens
from lwkv.blend.forward.rows import PromptReuse
from lwkv.blend.request import check_blend
from lwkv.blend.selector import configured_selector, top
from lwkv.errors import ConfigError


def reuse(*segments: tuple[int, int], num_tokens: int = 20, known: int = 0) -> PromptReuse:
    checked = check_blend(BlendRequest(list(range(num_tokens)), np.arange(num_tokens), segments), 100)
    reused = np.zeros(num_tokens, bool)
    for start, end in segments:
        reused[start:end] = True
    return PromptReuse(checked, known, reused, tuple(start for start, _ in segments))


def test_what_is_always_computed_is_what_is_neither_known_nor_reused() -> None:
    found = reuse((4, 7), (9, 12), num_tokens=14, known=2)
    assert found.always.tolist() == [2, 3, 7, 8, 12, 13]
    assert found.candidates.tolist() == [4, 5, 6, 9, 10, 11]
    assert found.question == 2
    assert reuse(num_tokens=5, known=1).question == 4


def test_all_and_none_and_the_first_of_each_segment() -> None:
    found = reuse((2, 7), (9, 11), (11, 15))
    assert AllTokens().choose(found, 0).tolist() == found.candidates.tolist()
    assert NoTokens().choose(found, 5).tolist() == []
    assert FirstTokens(3).choose(found, 0).tolist() == [2, 3, 4, 9, 10, 11, 12, 13]
    assert FirstTokens().choose(found, 6).tolist() == [2, 3, 9, 10, 11, 12]


def test_random_tokens_are_within_the_budget_and_the_same_for_the_same_seed() -> None:
    found = reuse((2, 18))
    one, again, other = (RandomTokens(seed).choose(found, 5).tolist() for seed in (1, 1, 2))
    assert len(set(one)) == 5
    assert set(one) <= set(found.candidates.tolist())
    assert one == again != other


@given(
    scores=st.lists(st.floats(allow_nan=True, width=32), min_size=1, max_size=12),
    data=st.data(),
)
def test_the_highest_scores_are_kept_beside_those_that_always_are(
    scores: list[float], data: st.DataObject
) -> None:
    always = data.draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores)))
    count = data.draw(st.integers(sum(always), len(scores)))
    kept = top(torch.tensor(scores), torch.tensor(always), count).tolist()
    assert kept == sorted(set(kept))
    assert len(kept) == count
    assert all(i in kept for i, flag in enumerate(always) if flag)
    clean = [0.0 if np.isnan(score) else min(score, 3e38) for score in scores]
    left = [clean[i] for i in range(len(scores)) if i not in kept]
    chosen = [clean[i] for i in kept if not always[i]]
    assert not left or not chosen or min(chosen) >= max(left)


def test_change_is_measured_in_v_or_in_k_and_over_its_length_with_a_threshold() -> None:
    old, new = torch.zeros(3, 2, 4), torch.zeros(3, 2, 4)
    old[:, 0, 0] = torch.tensor([1.0, 2.0, 4.0])
    new[:, 0, 0] = torch.tensor([1.0, 4.0, 2.0])
    same = torch.zeros(3, 2, 4)
    assert Deviation("v").score(same, new, same, old).tolist() == [0, 4, 4]
    assert Deviation("k").score(new, same, old, same).tolist() == [0, 4, 4]
    assert Deviation("k", threshold=0.5).score(new, same, old, same).tolist() == [0, 1, 0.25]


def test_a_threshold_leaves_budget_unused(bench: Bench) -> None:
    bench.encode(bench.blender())
    _, request = prompt([2, 0, 1])
    chosen = [
        bench.blender(Deviation(threshold=threshold), share=0.5).prefill([request])[0].num_chosen
        for threshold in (0.0, 1.0, 1e9)
    ]
    assert chosen[0] == 21
    assert 0 < chosen[1] < 21
    assert chosen[2] == 0


def test_gradual_filtering_chooses_among_those_chosen_before(bench: Bench) -> None:
    bench.encode(bench.blender())
    _, request = prompt([2, 0, 1])
    gradual = Deviation("v", (1, 2, 3), (0.5, 0.3, 0.1))
    (found,) = bench.blender(gradual, share=0.1).prefill([request])
    assert (found.num_reused, found.num_chosen) == (42, 4)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Deviation("q"), "part 'q'"),
        (lambda: Deviation(layers=(0,)), "from 1 on"),
        (lambda: Deviation(layers=(2, 1), shares=(0.2, 0.1)), "ascending"),
        (lambda: Deviation(layers=(1, 2), shares=(0.1, 0.2)), "none above the last"),
        (lambda: Deviation(layers=(1, 2)), "one for each"),
        (lambda: Deviation(shares=(15.0,)), r"shares: got 15.0; allowed: from 0 for none to 1 for all"),
        (lambda: Deviation(shares=(-0.5,)), "shares: got -0.5"),
        (lambda: Deviation(shares=(float("nan"),)), "shares: got nan"),
        (lambda: Deviation(layers=(1, 2), shares=(0.3, 0.0)), "the last is what is computed"),
        (lambda: QueryAttention(3, 2), "layers 3 to 2"),
    ],
)
def test_selectors_that_cannot_choose_are_refused(make: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("selector", [Deviation(layers=(4,)), QueryAttention(0, 4)])
def test_layers_that_the_model_does_not_have_are_refused(selector: object, bench: Bench) -> None:
    with pytest.raises(ConfigError, match="layer 4 is to be checked, but the model has layers 0 to 3"):
        bench.blender(selector)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("deviation", Deviation("v", (1,), (0.15,))),
        ("query", QueryAttention.of(4)),
        ("prefix_k", FirstTokens()),
    ],
)
def test_a_blender_chooses_as_is_configured(name: str, wanted: object, bench: Bench) -> None:
    other = Bench(bench.shape, torch.device("cpu"), blend_selector=name)
    assert other.blender().selector == wanted
    other.close()


def test_several_check_layers_are_gradual_filtering_and_have_to_exist() -> None:
    assert configured_selector("deviation", [(1, 0.3), (3, 0.1)], 4) == Deviation("v", (1, 3), (0.3, 0.1))
    with pytest.raises(ConfigError, match=r"blend_check_layers: got \(1, 4\); allowed are layers 1 to 3"):
        configured_selector("deviation", [(1, 0.3), (4, 0.1)], 4)
