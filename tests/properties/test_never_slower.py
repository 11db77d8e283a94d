"""A prompt with chunks in a tier below host memory is never answered much later than if it were computed.

The scheduler's half of vLLM's connector runs over simulated workers, tiers and steps, by a clock of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from integrations.vllm.simulated import Asked, Simulation, Tier

from lwkv.storage.prefetch import CHUNKS_AT_A_TIME

GB = 1e9
MORE = 1.05
STEPS_S = 0.012
"""Two steps in which requests decode: vLLM asks about waiting requests before a step, and learns after it."""
LOOK_UP_S = 0.01
"""What a look-up may take in any case."""


@dataclass(frozen=True)
class Place:
    """A tier, as it is to be in each run.

    Attributes:
        gb_per_s: of each rank.
        jitter: by what share the speed goes up and down.
        changes_at, factor: so many seconds after the prompts came, the speed becomes so many times as high.
    """

    gb_per_s: Sequence[float]
    latency_s: float = 0.0002
    jitter: float = 0.0
    changes_at: float = 0.0
    factor: float = 1.0
    look_up_s: float = 0.0

    @property
    def is_steady(self) -> bool:
        return self.factor == 1.0 and self.jitter == 0.0

    def speed(self, rank: int, came: list[float]) -> Callable[[float], float]:
        def bytes_per_s(now: float) -> float:
            factor = self.factor if came and now >= came[0] + self.changes_at else 1.0
            wave = 1 + self.jitter * ((int(now * 50) * 7919 % 13) / 6 - 1)
            return self.gb_per_s[rank] * GB * factor * wave

        return bytes_per_s


@dataclass(frozen=True)
class Load:
    """Prompts that come at once, of whose tokens a share is in the tier.

    Attributes:
        warm: whether prompts were computed before.
        known: whether the tier was read before.
    """

    lengths: Sequence[int]
    share: float = 1.0
    decoders: int = 16
    warm: bool = True
    known: bool = True


def answered(place: Place, load: Load, how: str) -> list[Asked]:
    """The prompts as they were answered: with everything computed, loaded, or with what was chosen."""
    came: list[float] = []
    tiers = [Tier(place.speed(rank, came), place.latency_s) for rank in range(len(place.gb_per_s))]
    # Small steps where there are several: else who comes first is a matter of where a step ends.
    budget = 16384 if len(load.lengths) == 1 else 2048
    simulation = Simulation(tiers, how != "all loaded", load.decoders, budget)
    for number in range(3 * load.warm):
        simulation.answer(simulation.ask(number, 8256))
        simulation.answer(simulation.ask(100 + number, 600))
    if how != "all computed":
        for number, length in enumerate(load.lengths):
            simulation.put(60 + number, int(load.share * length))
        simulation.put(50, 4096)
    if load.known:
        simulation.answer(simulation.ask(50, 4097))
        simulation.run_for(3.0)
    simulation.look_ups.seconds = place.look_up_s
    came.append(simulation.clock.now)
    asked = [simulation.ask(60 + number, length) for number, length in enumerate(load.lengths)]
    simulation.answer(*asked)
    return asked


def last_s(asked: Sequence[Asked]) -> float:
    return max(each.ttft_s or 0.0 for each in asked)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("gb_per_s", [0.1, 1.0, 1.4, 5.0])
def test_of_a_tier_that_is_slower_than_computing_nothing_is_waited_for(gb_per_s: float, known: bool) -> None:
    """Stores of 100 MB/s and of 1 GB/s, a disk as it was measured beside a large GPU, and a faster one."""
    place, load = Place([gb_per_s]), Load([8256], known=known)
    (computed,), (chosen,) = answered(place, load, "all computed"), answered(place, load, "chosen")
    assert computed.ttft_s == pytest.approx(0.218, abs=0.01)
    assert (chosen.ttft_s or 0.0) <= MORE * (computed.ttft_s or 0.0) + STEPS_S
    assert chosen.cached <= 512


@pytest.mark.parametrize("gb_per_s", [0.1, 1.0, 1.4])
def test_of_a_prompt_that_is_computed_after_all_no_more_is_read_than_had_begun(gb_per_s: float) -> None:
    simulation = Simulation([Tier(Place([gb_per_s]).speed(0, []))], True, 16, 16384)
    for number in range(3):
        simulation.answer(simulation.ask(number, 8256))
        simulation.answer(simulation.ask(100 + number, 600))
    for number in (60, 61):
        simulation.put(number, 8256)
        asked = simulation.ask(number, 8256)
        simulation.answer(asked)
        simulation.run_for(1.0)
        assert asked.cached == 0
    assert simulation.workers[0].num_read == CHUNKS_AT_A_TIME, "which show how fast the tier is"


@pytest.mark.parametrize("known", [False, True])
def test_a_tier_that_is_faster_is_waited_for_from_the_first_request_on(known: bool) -> None:
    place, load = Place([10.0]), Load([8256], known=known)
    (loaded,), (chosen,) = answered(place, load, "all loaded"), answered(place, load, "chosen")
    assert chosen.cached == 8192
    assert (chosen.ttft_s or 0.0) <= MORE * (loaded.ttft_s or 0.0) + STEPS_S


@pytest.mark.parametrize("factor", [1e-9, 0.1])
@pytest.mark.parametrize("changes_at", [0.0, 0.04, 0.09])
def test_what_has_come_of_a_tier_that_freezes_is_loaded_and_the_rest_computed(
    changes_at: float, factor: float
) -> None:
    place, load = Place([10.0], changes_at=changes_at, factor=factor), Load([8256])
    (computed,), (chosen,) = answered(place, load, "all computed"), answered(place, load, "chosen")
    assert (chosen.ttft_s or 0.0) <= MORE * (computed.ttft_s or 0.0) + STEPS_S
    assert chosen.cached == pytest.approx(changes_at * 10 * GB / 131072, abs=1024)


places = st.builds(
    Place,
    st.lists(st.floats(-1.7, 1.7).map(lambda power: 10**power), min_size=1, max_size=2),
    st.sampled_from([0.0002, 0.003, 0.02]),
    st.sampled_from([0.0, 0.4]),
    st.floats(0.0, 0.3),
    st.sampled_from([1.0, 1.0, 1e-9, 0.1, 10.0]),
    st.sampled_from([0.0, 0.004, 1.0]),
)


def loads(at_least: int, at_most: int) -> st.SearchStrategy[Load]:
    lengths = st.lists(st.integers(600, 24_000), min_size=at_least, max_size=at_most)
    return st.builds(
        *(Load, lengths, st.sampled_from([1.0, 0.97, 0.5]), st.sampled_from([0, 16])),
        *(st.just(True), st.booleans()),
    )


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(place=places, load=loads(1, 1))
def test_a_prompt_takes_hardly_longer_than_the_faster_of_loading_and_computing_it(
    place: Place, load: Load
) -> None:
    computed, chosen = last_s(answered(place, load, "all computed")), last_s(answered(place, load, "chosen"))
    slack = STEPS_S + LOOK_UP_S * (place.look_up_s > 0)
    # One that is alone may load while it is computed: if that freezes, it is computed again after that.
    is_alone = load.decoders == 0 and load.known and place.factor < 1.0
    assert chosen <= (1 + MORE if is_alone else MORE) * computed + slack
    if place.is_steady and load.known and place.look_up_s < LOOK_UP_S and min(place.gb_per_s) > 1.0:
        assert chosen <= MORE * last_s(answered(place, load, "all loaded")) + slack


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(place=places, load=loads(2, 3))
def test_several_prompts_that_come_at_once_are_all_answered_by_then(place: Place, load: Load) -> None:
    computed, chosen = last_s(answered(place, load, "all computed")), last_s(answered(place, load, "chosen"))
    assert chosen <= MORE * computed + 2 * STEPS_S + LOOK_UP_S
