"""What every tier promises: tests/storage/places.py has the tiers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from storage.faulty_tier import LONG_S, Fault, FaultyTier
from storage.places import PLACES, OpenTier, make_setup
from storage.rig import NUM_LAYERS, PAGE_BYTES, Rig, key, keys, value
from storage.tier_calls import layer_keys, load, page_of, put, store

from lwkv.keys import ChunkKey, LayerKey
from lwkv.storage import Status, Tier

SIZES = (1, 5, 4095, 4096, 4097, 3 * 4096)
UNKNOWN = key(99)


@pytest.fixture(params=PLACES)
def open_tier(request: pytest.FixtureRequest) -> OpenTier:
    return PLACES[request.param](request)


@pytest.fixture
def opened(open_tier: OpenTier) -> Iterator[Callable[..., Tier]]:
    """Opens tiers of a page size at the same place, and closes them when the test ends."""
    tiers: list[Tier] = []

    def open_one(page_bytes: int = PAGE_BYTES) -> Tier:
        tiers.append(open_tier(make_setup(page_bytes, NUM_LAYERS)))
        return tiers[-1]

    yield open_one
    for tier in tiers:
        tier.close()


@pytest.mark.parametrize("num_bytes", SIZES)
def test_what_was_put_is_got_byte_for_byte(opened: Callable[..., Tier], num_bytes: int) -> None:
    tier = opened(num_bytes)
    store(tier, *keys(1, 2), num_bytes=num_bytes)
    asked = [each for chunk in keys(2, 1) for each in layer_keys(chunk, range(NUM_LAYERS))]
    assert load(tier, asked, num_bytes) == [Status.OK] * len(asked)


def test_pages_may_begin_at_any_address(opened: Callable[..., Tier]) -> None:
    tier, num_bytes = opened(4096), 4096
    store(tier, key(1), num_bytes=num_bytes)
    memory = torch.zeros(num_bytes + 7, dtype=torch.uint8)
    assert tier.get([LayerKey(key(1), 2)], [memory[7:]], LONG_S) == [Status.OK]
    assert torch.equal(memory[7:], page_of(LayerKey(key(1), 2), num_bytes))
    assert not memory[:7].any()


def test_a_tier_that_was_opened_in_inference_mode_works_outside_of_it(opened: Callable[..., Tier]) -> None:
    """Engines are made in inference mode; the threads that call tiers are not in it."""
    with torch.inference_mode():
        tier = opened()
    store(tier, key(1))
    assert load(tier, layer_keys(key(1), range(NUM_LAYERS))) == [Status.OK] * NUM_LAYERS


@pytest.mark.parametrize("num_layers", [1, NUM_LAYERS + 2])
def test_chunks_of_another_namespace_may_have_more_or_fewer_layers(
    open_tier: OpenTier, num_layers: int
) -> None:
    other = ChunkKey("other", key(1).hash)
    setup = replace(make_setup(PAGE_BYTES, NUM_LAYERS), layers={"other": num_layers})
    with closing(open_tier(setup)) as tier:
        store(tier, key(1))
        assert not num_layers - 1 or {*put(tier, other, range(1, num_layers))} == {Status.OK}
        assert tier.contains([key(1), other], LONG_S) == [True, False]
        assert put(tier, other, [0]) == [Status.OK]
        asked = [*layer_keys(other, range(num_layers)), *layer_keys(key(1), range(NUM_LAYERS))]
        assert tier.contains([key(1), other], LONG_S) == [True, True]
        assert load(tier, asked) == [Status.OK] * len(asked)


def test_a_chunk_is_there_once_its_layer_0_is(opened: Callable[..., Tier]) -> None:
    tier, other = opened(), opened()
    assert tier.contains(keys(1), LONG_S) == [False]
    assert put(tier, key(1), range(1, NUM_LAYERS)) == [Status.OK] * (NUM_LAYERS - 1)
    assert [one.contains(keys(1), LONG_S) for one in (tier, other)] == [[False]] * 2
    assert put(tier, key(1), [0]) == [Status.OK]
    assert [one.contains(keys(1), LONG_S) for one in (tier, other)] == [[True]] * 2


def test_what_is_not_there_is_a_miss(opened: Callable[..., Tier]) -> None:
    tier = opened()
    store(tier, key(1))
    assert tier.contains([UNKNOWN, key(1), key(2)], LONG_S) == [False, True, False]
    asked = [LayerKey(UNKNOWN, 0), LayerKey(key(1), 1), LayerKey(key(2), 2), LayerKey(key(1), 0)]
    assert load(tier, asked) == [Status.MISS, Status.OK, Status.MISS, Status.OK]
    assert (tier.contains([], LONG_S), tier.get([], [], LONG_S), tier.put([], [], LONG_S)) == ([], [], [])


def test_chunks_of_two_namespaces_are_two(opened: Callable[..., Tier]) -> None:
    tier, other = opened(), ChunkKey("another-model", key(1).hash)
    store(tier, key(1))
    assert tier.contains([other], LONG_S) == [False]
    assert load(tier, [LayerKey(other, 0)]) == [Status.MISS]
    store(tier, other)
    asked = [LayerKey(chunk, layer) for chunk in (other, key(1)) for layer in range(NUM_LAYERS)]
    assert load(tier, asked) == [Status.OK] * len(asked)


def test_what_is_put_again_stays_what_it_is(opened: Callable[..., Tier]) -> None:
    for tier in (opened(), opened()):
        store(tier, key(1))
        store(tier, key(1))
        assert load(tier, layer_keys(key(1), range(NUM_LAYERS))) == [Status.OK] * NUM_LAYERS


def test_a_put_that_was_broken_off_can_be_made_again(opened: Callable[..., Tier]) -> None:
    tier = opened()
    put(tier, key(1), range(1, NUM_LAYERS))
    put(tier, key(1), [1])
    store(tier, key(1))
    assert load(tier, layer_keys(key(1), range(NUM_LAYERS))) == [Status.OK] * NUM_LAYERS


def test_another_process_at_the_same_place_finds_what_was_put(opened: Callable[..., Tier]) -> None:
    early, writer = opened(), opened()
    store(writer, *keys(1, 2))
    for reader in (early, opened()):
        assert reader.contains(keys(1, 2, 3), LONG_S) == [True, True, False]
        assert load(reader, layer_keys(key(2), range(NUM_LAYERS))) == [Status.OK] * NUM_LAYERS


def test_after_close_nothing_is_ok(open_tier: OpenTier) -> None:
    tier = open_tier(make_setup(PAGE_BYTES, NUM_LAYERS))
    store(tier, key(1))
    tier.close()
    for call in (lambda: load(tier, [LayerKey(UNKNOWN, 1)]), lambda: put(tier, key(2), [1])):
        with suppress(OSError, RuntimeError, ValueError):
            assert Status.OK not in call()


def test_many_threads_get_and_put_at_once(opened: Callable[..., Tier]) -> None:
    tiers, wrong = [opened(), opened()], []

    def work(seed: int) -> None:
        tier, mine = tiers[seed % 2], [key(seed // 2 * 4 + i) for i in range(4)]
        for chunk in mine:
            store(tier, chunk)
        statuses = load(tier, [LayerKey(chunk, layer) for layer in range(NUM_LAYERS) for chunk in mine])
        wrong.extend(status for status in statuses if status is not Status.OK)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert not wrong


def half_filled(pages: Sequence[torch.Tensor]) -> None:
    """As a transfer that breaks off leaves them."""
    for page in pages:
        page[: len(page) // 2] = 77


def after(order: list[threading.Event], turn: int) -> Callable[[object], None]:
    """Have this call end in its `turn`, where the earlier ones come at all."""

    def wait_for_turn(_: object) -> None:
        if turn:
            order[turn - 1].wait(0.05)
        order[turn].set()

    return wait_for_turn


def make_faults(plan: Sequence[tuple[str, int, str]]) -> dict[str | tuple[str, int], Fault]:
    turns = [threading.Event() for _ in plan]
    kinds: dict[str, Callable[[int], Fault]] = {
        "fail": lambda i: Fault(error=ConnectionError("gone")),
        "delay": lambda i: Fault(before=lambda _: turns[i].wait(0.01)),
        "truncate": lambda i: Fault(before=half_filled, error=EOFError("half of it")),
        "drop": lambda i: Fault(answer=lambda answers: [Status.MISS] * len(answers)),
        "short": lambda i: Fault(answer=lambda answers: answers[:-1]),
        "reorder": lambda i: Fault(before=after(turns, len(plan) - 1 - i)),
    }
    return {(name, call): kinds[kind](i) for i, (name, call, kind) in enumerate(plan)}


plans = st.lists(
    st.tuples(
        st.sampled_from(["contains", "get", "put"]),
        st.integers(0, 7),
        st.sampled_from(["fail", "delay", "truncate", "drop", "short", "reorder"]),
    ),
    max_size=6,
)


@given(plan=plans)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_goes_wrong_pages_are_right_or_missing_and_nothing_is_left_behind(
    open_tier: OpenTier, plan: list[tuple[str, int, str]]
) -> None:
    tier = FaultyTier(inner=open_tier(make_setup(PAGE_BYTES, NUM_LAYERS)))
    rig = Rig(8, [tier])
    tier.faults = make_faults(plan)
    numbers = (1, 2, 3)
    for _ in range(2):
        write = rig.begin(*numbers)
        if write is not None:
            write.commit()
        rig.settle()
        cached = [number for number in numbers if rig.host.contains(keys(number))[0]]
        rig.forget(*cached)
        hold = rig.hold(*numbers)
        for layer, row in enumerate(rig.load(hold)):
            wanted = [value(number, layer) for number in numbers]
            assert all(got in (None, right) for got, right in zip(row, wanted, strict=False))
        hold.release()
        rig.clock.now += 1000
    tier.end_faults()
    rig.clock.now += 1000
    if (write := rig.begin(*numbers)) is not None:
        write.commit()
    rig.settle()
    assert rig.lookup(*numbers) == len(numbers)
    rig.end()
