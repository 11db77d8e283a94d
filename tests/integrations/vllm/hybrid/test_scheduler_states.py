"""Layers that keep states: what is loaded before a request is scheduled, and which states are stored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from integrations.vllm.hybrid.test_scheduler import Request

from lwkv.errors import LwkvError
from lwkv.integrations.vllm.hybrid.groups import CacheGroups
from lwkv.integrations.vllm.hybrid.orders import HybridOrders, StoreOrder
from lwkv.integrations.vllm.hybrid.reports import Change, HybridInfo, HybridReport, HybridReports
from lwkv.integrations.vllm.hybrid.request import STRIDE
from lwkv.integrations.vllm.hybrid.scheduler import MOST_FAILED, HybridScheduler
from lwkv.integrations.vllm.scheduler.side import Role
from lwkv.kinds import Kind, choose_chunk_size

CHUNK = 8
FULL, STATE = 0, 1
# A state takes as much as two tokens of full attention.
KINDS = Kind("full", 4, 1, 64), Kind("state", CHUNK, 2, 16)
GROUPS = CacheGroups(KINDS, (STATE, FULL), choose_chunk_size(CHUNK, [CHUNK]))


def make(**more: Any) -> HybridScheduler:
    side = HybridScheduler(GROUPS, Role(True, True), **more)
    side.introduce(INFO)
    return side


INFO = HybridInfo(0, "chain", CHUNK)


def tables(num_tokens: int, boundary: int = 0) -> list[list[int]]:
    """Blocks of the two groups: of states those at a boundary and at the end alone."""
    number = -(-num_tokens // CHUNK)
    states = [i + 1 if i in (boundary // CHUNK - 1, number - 1) else 0 for i in range(number)]
    return [states, list(range(100, 100 + -(-num_tokens // 4)))]


def output(scheduled: dict[str, tuple[int, int]], finished: tuple[str, ...] = ()) -> Any:
    """A step of vLLM's: by request, tokens computed before and in it."""
    blocks = {name: tables(computed + number) for name, (computed, number) in scheduled.items()}
    return SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(scheduled), num_computed_tokens=[computed for computed, _ in scheduled.values()]
        ),
        num_scheduled_tokens={name: number for name, (_, number) in scheduled.items()},
        finished_req_ids=set(finished),
        kv_connector_block_state=SimpleNamespace(get_block_ids=blocks.get),
    )


def answer(side: HybridScheduler, orders: HybridOrders, failed: tuple[str, ...] = ()) -> None:
    """A worker that pins all that it is ordered to, and has at once what is stored."""
    changes = [change for order in orders.stores for change in kept(order)]
    pinned = {pin.number: True for pin in orders.pins}
    side.learn(HybridReports((HybridReport(INFO, changes, pinned, failed),)))


def kept(order: StoreOrder) -> list[Change]:
    hashes = order.hashes.apart()
    states = [hashes[at // CHUNK - 1] for at in order.boundaries if at == order.end]
    return [Change(FULL, True, hashes[order.start // CHUNK :]), Change(STATE, True, states)]


def compute(side: HybridScheduler, request: Request, ends: list[int], computed: int = 0) -> list[StoreOrder]:
    """Run a request in steps that end at `ends`; all that it stores."""
    side.allocated(request, tables(request.num_tokens), 0)
    stores: list[StoreOrder] = []
    for end in ends:
        orders = side.orders(output({request.request_id: (computed, end - computed)}))
        answer(side, orders)
        stores += orders.stores
        computed = end
    answer(side, side.orders(output({}, (request.request_id,))))
    return stores


def ask(side: HybridScheduler, request: Request, local: int = 0) -> int:
    """What is promised in the end."""
    while (found := side.num_new_matched_tokens(request, local)) is None:
        answer(side, side.orders(output({})))
    return found


def prompt(seed: int, length: int) -> list[int]:
    return [1000 * seed + i for i in range(length)]


def test_a_request_is_loaded_before_it_is_scheduled_and_comes_again_with_nothing_to_load() -> None:
    side = make()
    assert side.loads_apart
    compute(side, Request("a", prompt(1, 37)), [32, 37])
    request = Request("b", prompt(1, 37))
    assert ask(side, request, 8) == 24
    side.allocated(request, tables(32, 32), 24)
    orders = side.orders(output({}))
    (load,) = orders.loads_apart
    assert (load.request_id, load.local, load.boundary, orders.loads) == ("b", 8, 32, [])
    assert (load.tables, orders.released) == (tables(32, 32), [])
    answer(side, orders)
    assert len(side.orders(output({})).released) == 1
    side.allocated(request, tables(37, 32), 0)
    orders = side.orders(output({"b": (32, 5)}))
    assert (orders.loads, orders.loads_apart) == ([], [])


def test_what_was_loaded_before_a_reset_is_not_stored_after_it() -> None:
    side = make()
    compute(side, Request("a", prompt(1, 37)), [32, 37])
    request = Request("b", prompt(1, 37))
    assert ask(side, request) == 32
    side.allocated(request, tables(32, 32), 32)
    answer(side, side.orders(output({})))
    side.reset()
    assert compute(side, request, [37], 32) == []
    assert compute(side, Request("b", prompt(1, 37)), [32, 37]) != []


def test_a_state_is_found_at_its_own_token_alone() -> None:
    side = make()
    compute(side, Request("a", prompt(1, 36)), [32, 36])
    assert ask(side, Request("b", prompt(1, 32))) == 0
    assert ask(side, Request("c", prompt(1, 33))) == 32


def test_where_a_step_ends_within_a_chunk_no_state_is_stored() -> None:
    (first, second) = compute(make(), Request("a", prompt(1, 36)), [20, 36])
    assert (first.end, first.boundaries) == (16, frozenset())
    assert (second.end, second.boundaries) == (32, frozenset())


def test_within_a_prompt_states_take_an_eighth_of_the_bytes_of_full_attention() -> None:
    side, ends = make(), [*range(8, 97, 8), 99]
    stores = compute(side, Request("a", prompt(1, 99)), ends)
    found = sorted(at for store in stores for at in store.boundaries)
    assert found == [16, 32, 48, 64, 80, 96]
    assert STRIDE * 2 == 16


def test_a_prompt_that_goes_on_counts_from_there() -> None:
    side = make()
    request = Request("a", prompt(1, 99))
    stores = compute(side, request, [*range(16, 97, 8), 99], computed=8)
    assert sorted(at for store in stores for at in store.boundaries) == [24, 40, 56, 72, 88, 96]


def test_the_state_where_prompts_part_is_stored_if_a_step_ends_there() -> None:
    side, begin = make(), prompt(1, 24)
    compute(side, Request("a", begin + prompt(2, 50)), [72, 74])
    request = Request("b", begin + prompt(3, 50))
    assert ask(side, request) == 0
    stores = compute(side, request, [8, 24, 32, 72, 74])
    assert {24} in [store.boundaries for store in stores]
    assert ask(side, Request("c", begin + prompt(4, 50))) == 24


def test_vllm_knows_of_prompts_that_part_too() -> None:
    request = Request("b", prompt(3, 74))
    request.shared_prefix_boundary = 10  # type: ignore[attr-defined]
    assert {8} in [store.boundaries for store in compute(make(), request, [8, 24, 72, 74])]


@pytest.mark.parametrize("save_decodes", [False, True])
def test_states_behind_generated_tokens_are_stored_if_that_is_wanted(save_decodes: bool) -> None:
    side, request = make(save_decodes=save_decodes), Request("a", prompt(1, 13))
    side.allocated(request, tables(13), 0)
    found: list[int] = []
    for computed in [0, 8, *range(13, 28)]:
        number = {0: 8, 8: 5}.get(computed, 1)
        orders = side.orders(output({"a": (computed, number)}))
        found += [at for store in orders.stores for at in store.boundaries]
        request.all_token_ids += [7] * (computed > 0)
    assert found == ([8, 16, 24] if save_decodes else [8])


def test_a_load_that_fails_again_and_again_is_computed() -> None:
    side = make()
    compute(side, Request("a", prompt(1, 37)), [32, 37])
    request, times = Request("b", prompt(1, 37)), 0
    while ask(side, request):
        side.allocated(request, tables(32, 32), 32)
        orders = side.orders(output({}))
        assert len(orders.loads_apart) == 1
        answer(side, orders, failed=("b", "long gone"))
        times += 1
    assert times == MOST_FAILED
    compute(side, request, [32, 37])
    assert ask(side, request) == 32  # after a preemption: it was computed, and others may have been loaded


def test_a_request_with_the_id_of_one_that_was_aborted_is_loaded_in_the_same_step() -> None:
    side = make()
    compute(side, Request("a", prompt(1, 37)), [32, 37])
    assert ask(side, Request("x", prompt(1, 37))) == 32
    other = Request("x", prompt(1, 37))
    assert side.num_new_matched_tokens(other, 0) is None
    answer(side, side.orders(output({})))
    assert side.num_new_matched_tokens(other, 0) == 32
    side.allocated(other, tables(32, 32), 32)
    (load,) = side.orders(output({}, ("x",))).loads_apart
    assert load.boundary == 32


def test_a_load_without_a_block_for_the_state_is_an_error() -> None:
    side = make()
    compute(side, Request("a", prompt(1, 37)), [32, 37])
    request = Request("b", prompt(1, 37))
    assert ask(side, request) == 32
    side.allocated(request, [tables(32)[0], [0] * 8], 32)
    with pytest.raises(LwkvError, match="no blocks for all that 'b' needs of full"):
        side.orders(output({}))
