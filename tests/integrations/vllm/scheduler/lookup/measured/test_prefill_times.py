from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lwkv.integrations.vllm.scheduler.lookup.measured.prefill_times import PrefillTimes

STEP_S, TOKEN_S, ATTENTION_S = 0.02, 24e-6, 4.2e-10


def seconds(num_tokens: int, position: float) -> float:
    return STEP_S + num_tokens * (TOKEN_S + ATTENTION_S * position)


def measured(*steps: tuple[int, float]) -> PrefillTimes:
    """What is known of some steps of so many tokens at these positions, each computed three times."""
    times = PrefillTimes()
    for num_tokens, position in steps * 3:
        times.add(position, num_tokens, seconds(num_tokens, position))
    return times


def tokens_s(times: PrefillTimes, num_tokens: int, position: float) -> float:
    return float(times.tokens_s(np.array([float(num_tokens)]), np.array([position]))[0])


def test_small_steps_do_not_make_the_first_tokens_of_a_long_prompt_expensive() -> None:
    """As on a GPU: prompts of 129 tokens, two in a step, beside those of 8256 tokens."""
    times = measured((258, 65.0), (8256, 4128.0))
    assert tokens_s(times, 3072, 1536.0) == pytest.approx(seconds(3072, 1536.0) - STEP_S, rel=0.1)
    assert times.step_s() == pytest.approx(STEP_S, rel=0.1)


def test_as_long_as_only_small_steps_are_known_tokens_are_thought_cheap() -> None:
    times = measured((258, 65.0))
    assert times.is_known
    assert tokens_s(times, 8192, 4096.0) < seconds(8192, 4096.0)


def test_what_is_behind_many_others_takes_longer() -> None:
    times = measured((2048, 1024.0), (2048, 30_000.0), (512, 1024.0))
    assert tokens_s(times, 1024, 60_000.0) == pytest.approx(seconds(1024, 60_000.0) - STEP_S, rel=0.1)
    assert times.per_second() == pytest.approx(1 / TOKEN_S, rel=0.1)


def test_a_step_that_was_held_up_and_the_first_ones_count_for_little() -> None:
    times = PrefillTimes()
    for factor in (1.8, 1.0, 1.0, 5.0, 1.0):
        times.add(4128.0, 8256, factor * seconds(8256, 4128.0))
        times.add(300.0, 600, factor * seconds(600, 300.0))
    assert tokens_s(times, 8256, 4128.0) == pytest.approx(seconds(8256, 4128.0) - STEP_S, rel=0.1)


def test_nothing_is_known_before_a_step() -> None:
    times = PrefillTimes()
    times.add(0.0, 100, 0.0)
    assert (times.is_known, times.step_s(), times.per_second()) == (False, 0.0, 0)
    assert tokens_s(times, 100, 0.0) == 0.0


@given(
    steps=st.lists(
        st.tuples(st.integers(256, 1 << 15), st.floats(0.0, 1e6), st.floats(1e-6, 1e3)), min_size=1
    )
)
def test_no_time_is_below_none_whatever_was_measured(steps: list[tuple[int, float, float]]) -> None:
    times = PrefillTimes()
    for num_tokens, position, taken in steps:
        times.add(position, num_tokens, taken)
    assert times.step_s() >= 0
    found = times.tokens_s(np.array([0.0, 256.0, 1e5]), np.array([0.0, 100.0, 5e4]))
    assert (np.diff(found) >= 0).all()
    assert found[0] == 0
    assert np.isfinite(found).all()
