from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from lwkv.errors import ConfigError, LwkvError
from lwkv.integrations.vllm.hybrid.groups import CacheGroups
from lwkv.integrations.vllm.hybrid.orders import HybridOrders
from lwkv.integrations.vllm.hybrid.promises import MOST_AT_A_TIME
from lwkv.integrations.vllm.hybrid.reports import Change, HybridInfo, HybridReport, HybridReports
from lwkv.integrations.vllm.hybrid.scheduler import MOST_FAILED, HybridScheduler
from lwkv.integrations.vllm.scheduler.side import Role
from lwkv.kinds import Kind, choose_chunk_size

BLOCK, CHUNK, WINDOW = 4, 8, 6
FULL, SLIDING = 0, 1
TIMEOUT_S = 10.0


@dataclass(eq=False)
class Request:
    """As much of vLLM's Request as the connector looks at."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int = 0
    prompt_embeds: None = None
    sampling_params: Any = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.all_token_ids)
        self.prompt_token_ids = list(self.all_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Ranks:
    """Workers that pin what they have, and report that they have all that they are ordered to store."""

    side: HybridScheduler
    kinds: tuple[Kind, ...]
    number: int = 1
    has: list[list[set[bytes]]] = field(default_factory=list)
    pinned: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.has = [[set() for _ in self.kinds] for _ in range(self.number)]
        for rank in range(self.number):
            self.side.introduce(self.info(rank))

    def info(self, rank: int) -> HybridInfo:
        return HybridInfo(rank, "chain", CHUNK)

    def answer(self, orders: HybridOrders) -> None:
        self.pinned.difference_update(orders.released)
        for rank in range(self.number):
            answers = {pin.number: self.can_pin(rank, pin) for pin in orders.pins}
            self.pinned.update(number for number, is_pinned in answers.items() if is_pinned)
            changes = [change for store in orders.stores for change in self.store(rank, store)]
            self.side.learn(HybridReports((HybridReport(self.info(rank), changes, answers),)))

    def can_pin(self, rank: int, pin: Any) -> bool:
        return all(
            pin.hashes.apart()[chunk] in self.has[rank][number]
            for number, kind in enumerate(self.kinds)
            for chunk in chunks(kind, pin.local, pin.boundary)
        )

    def store(self, rank: int, order: Any) -> list[Change]:
        hashes = order.hashes.apart()
        found = [
            {hashes[chunk] for chunk in range(order.start // CHUNK, order.end // CHUNK)},
            {hashes[chunk] for at in order.boundaries for chunk in chunks(self.kinds[SLIDING], 0, at)},
        ]
        for number, kept in enumerate(found):
            self.has[rank][number] |= kept
        return [Change(number, True, sorted(kept)) for number, kept in enumerate(found)]

    def drop(self, rank: int, kind: int) -> None:
        """Evict all of a kind, and report it."""
        dropped, self.has[rank][kind] = self.has[rank][kind], set()
        change = Change(kind, False, sorted(dropped))
        self.side.learn(HybridReports((HybridReport(self.info(rank), [change]),)))


def chunks(kind: Kind, local: int, boundary: int) -> range:
    return range(kind.first_needed(boundary, local) // CHUNK, boundary // CHUNK)


KINDS = Kind("full", BLOCK, 1, 64), Kind("window", BLOCK, 2, 64, span=WINDOW)
GROUPS = CacheGroups(KINDS, (SLIDING, FULL, SLIDING), choose_chunk_size(CHUNK, [BLOCK]))


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make(clock: Clock, num_ranks: int = 1, **more: Any) -> tuple[HybridScheduler, Ranks]:
    side = HybridScheduler(GROUPS, Role(True, True), num_ranks, timeout_s=TIMEOUT_S, clock=clock, **more)
    return side, Ranks(side, KINDS, num_ranks)


def tables(num_tokens: int, computed: int = 0) -> tuple[list[int], ...]:
    """Blocks of the three groups; those behind the window are null."""
    number = -(-num_tokens // BLOCK)
    gone = max(0, computed - WINDOW + 1) // BLOCK
    return tuple(
        [0 if kind == SLIDING and i < gone else 1 + 100 * group + i for i in range(number)]
        for group, kind in enumerate(GROUPS.kind_of)
    )


def output(scheduled: dict[str, tuple[int, int]], finished: tuple[str, ...] = ()) -> Any:
    """A step of vLLM's: by request, tokens computed before and in it."""
    blocks = {name: tables(computed + number, computed) for name, (computed, number) in scheduled.items()}
    return SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(scheduled), num_computed_tokens=[computed for computed, _ in scheduled.values()]
        ),
        num_scheduled_tokens={name: number for name, (_, number) in scheduled.items()},
        finished_req_ids=set(finished),
        kv_connector_block_state=SimpleNamespace(get_block_ids=blocks.get),
    )


def compute(side: HybridScheduler, ranks: Ranks, request: Request, step: int = 1000) -> HybridOrders:
    """Run a request whose prompt is not loaded; the orders of its last step."""
    assert side.num_new_matched_tokens(request, 0) == 0
    side.allocated(request, (), 0)
    computed, orders = 0, HybridOrders(0)
    while computed < request.num_tokens:
        number = min(step, request.num_tokens - computed)
        orders = side.orders(output({request.request_id: (computed, number)}))
        ranks.answer(orders)
        computed += number
    ranks.answer(side.orders(output({}, (request.request_id,))))
    return orders


def asked(side: HybridScheduler, ranks: Ranks, request: Request, local: int = 0) -> int:
    """What is promised in the end."""
    while True:
        found = side.num_new_matched_tokens(request, local)
        if found is not None:
            return found
        ranks.answer(side.orders(output({})))


def prompt(seed: int, length: int) -> list[int]:
    return [1000 * seed + i for i in range(length)]


def test_what_was_stored_is_promised_once_all_ranks_have_pinned_it(clock: Clock) -> None:
    side, ranks = make(clock, num_ranks=2)
    compute(side, ranks, Request("a", prompt(1, 37)))
    request = Request("b", prompt(1, 37))
    assert side.num_new_matched_tokens(request, 0) is None
    orders = side.orders(output({}))
    assert [(pin.local, pin.boundary) for pin in orders.pins] == [(0, 32)]
    for rank in range(2):
        assert side.num_new_matched_tokens(request, 0) is None
        answers = {orders.pins[0].number: True}
        side.learn(HybridReports((HybridReport(ranks.info(rank), (), answers),)))
    assert side.num_new_matched_tokens(request, 0) == 32


def test_a_load_has_the_blocks_of_every_group_and_is_released_after_its_step(clock: Clock) -> None:
    side, ranks = make(clock)
    compute(side, ranks, Request("a", prompt(1, 37)))
    request = Request("b", prompt(1, 37))
    assert asked(side, ranks, request, 4) == 28
    side.allocated(request, (), 28)
    orders = side.orders(output({"b": (32, 5)}))
    (load,) = orders.loads
    assert (load.local, load.boundary) == (4, 32)
    assert load.tables == [*tables(37, 32)]
    assert not orders.released
    ranks.answer(orders)
    assert ranks.pinned
    ranks.answer(side.orders(output({"b": (37, 1)})))
    assert not ranks.pinned


def test_the_whole_prompt_is_never_promised(clock: Clock) -> None:
    side, ranks = make(clock)
    compute(side, ranks, Request("a", prompt(1, 32)))
    assert asked(side, ranks, Request("b", prompt(1, 32))) == 24


def test_windows_are_stored_where_prompts_end_and_now_and_then(clock: Clock) -> None:
    side, ranks = make(clock)
    (store,) = compute(side, ranks, Request("a", prompt(1, 131))).stores
    assert (store.start, store.end) == (0, 128)
    assert sorted(store.boundaries) == [48, 96, 128]


@pytest.mark.parametrize("step", [3, 8, 20])
def test_boundaries_do_not_depend_on_how_a_prompt_is_cut(clock: Clock, step: int) -> None:
    side, ranks = make(clock)
    compute(side, ranks, Request("a", prompt(1, 131)), step)
    other, others = make(clock)
    compute(other, others, Request("a", prompt(1, 131)))
    assert ranks.has[0][SLIDING] >= others.has[0][SLIDING]
    assert ranks.has[0][FULL] == others.has[0][FULL]


def test_a_prompt_that_parts_from_another_leaves_a_window_there(clock: Clock) -> None:
    side, ranks = make(clock)
    begin = prompt(1, 33)
    compute(side, ranks, Request("a", begin + prompt(2, 30)))
    assert compute(side, ranks, Request("b", begin + prompt(3, 30))).stores[0].boundaries >= {32}
    assert asked(side, ranks, Request("c", begin + prompt(4, 30))) == 32


def test_a_rank_without_one_kind_has_nothing_promised(clock: Clock) -> None:
    side, ranks = make(clock, num_ranks=2)
    compute(side, ranks, Request("a", prompt(1, 37)))
    ranks.drop(1, SLIDING)
    assert asked(side, ranks, Request("b", prompt(1, 37))) == 0


def test_what_goes_between_the_look_up_and_the_pin_is_not_promised(clock: Clock) -> None:
    side, ranks = make(clock)
    compute(side, ranks, Request("a", prompt(1, 37)))
    request = Request("b", prompt(1, 37))
    assert side.num_new_matched_tokens(request, 0) is None
    orders = side.orders(output({}))
    ranks.drop(0, FULL)
    ranks.answer(orders)
    assert asked(side, ranks, request) == 0


def test_a_worker_that_never_pins_what_it_has_is_asked_a_few_times(clock: Clock) -> None:
    side, ranks = make(clock)
    compute(side, ranks, Request("a", prompt(1, 37)))
    request, times = Request("b", prompt(1, 37)), 0
    while side.num_new_matched_tokens(request, 0) is None:
        for pin in side.orders(output({})).pins:
            times += 1
            side.learn(HybridReports((HybridReport(ranks.info(0), (), {pin.number: False}),)))
    assert times == MOST_FAILED


def test_a_worker_that_does_not_answer_is_waited_for_no_longer_than_the_timeout(clock: Clock) -> None:
    side, ranks = make(clock)
    compute(side, ranks, Request("a", prompt(1, 37)))
    request = Request("b", prompt(1, 37))
    for _ in range(MOST_FAILED):
        assert side.num_new_matched_tokens(request, 0) is None
        clock.now += TIMEOUT_S
        assert side.num_new_matched_tokens(request, 0) in (None, 0)
    assert side.num_new_matched_tokens(request, 0) == 0


def test_a_promise_is_made_anew_where_vllm_has_lost_its_own_part(clock: Clock) -> None:
    side, ranks = make(clock)
    compute(side, ranks, Request("a", prompt(1, 37)))
    request = Request("b", prompt(1, 37))
    assert asked(side, ranks, request, 16) == 16
    assert side.num_new_matched_tokens(request, 24) == 8
    assert side.num_new_matched_tokens(request, 8) is None
    assert asked(side, ranks, request, 8) == 24


def test_a_request_that_ends_before_its_load_leaves_nothing_pinned(clock: Clock) -> None:
    side, ranks = make(clock)
    compute(side, ranks, Request("a", prompt(1, 37)))
    for name in "bcd":
        assert asked(side, ranks, Request(name, prompt(1, 37))) == 32
    ranks.answer(side.orders(output({}, ("b", "c"))))
    clock.now += 2 * TIMEOUT_S
    ranks.answer(side.orders(output({})))
    assert not ranks.pinned


def test_a_request_with_the_id_of_one_that_was_aborted_is_promised_nothing_of_it(clock: Clock) -> None:
    side, ranks = make(clock)
    compute(side, ranks, Request("a", prompt(1, 37)))
    assert asked(side, ranks, Request("x", prompt(1, 37))) == 32
    other = Request("x", prompt(2, 37))
    assert side.num_new_matched_tokens(other, 0) == 0
    ranks.answer(side.orders(output({}, ("x",))))
    assert not ranks.pinned


def test_what_no_worker_has_heard_of_is_neither_pinned_nor_released(clock: Clock) -> None:
    side, ranks = make(clock)
    compute(side, ranks, Request("a", prompt(1, 37)))
    assert side.num_new_matched_tokens(Request("b", prompt(1, 37)), 0) is None
    clock.now += 2 * TIMEOUT_S
    orders = side.orders(output({}))
    assert (orders.pins, orders.released) == ([], [])


def test_what_a_step_loads_is_pinned_to_its_end_however_long_its_request_waited(clock: Clock) -> None:
    side, ranks = make(clock)
    compute(side, ranks, Request("a", prompt(1, 37)))
    request = Request("b", prompt(1, 37))
    assert asked(side, ranks, request) == 32
    side.allocated(request, (), 32)
    clock.now += 2 * TIMEOUT_S
    orders = side.orders(output({"b": (32, 5)}))
    assert (len(orders.loads), orders.released) == (1, [])
    ranks.answer(orders)
    assert len(ranks.pinned) == 1
    ranks.answer(side.orders(output({}, ("b",))))
    assert not ranks.pinned


def test_a_queue_is_looked_up_once_while_no_more_can_be_pinned(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    side, ranks = make(clock)
    compute(side, ranks, Request("a", prompt(1, 37)))
    requests = [Request(str(number), prompt(1, 37)) for number in range(MOST_AT_A_TIME + 5)]
    looked_up = []
    boundary = side._index.boundary

    def count(*arguments: Any) -> int:
        looked_up.append(arguments)
        return boundary(*arguments)

    monkeypatch.setattr(side._index, "boundary", count)
    for _ in range(3):
        for request in requests:
            side.num_new_matched_tokens(request, 0)
        ranks.answer(side.orders(output({})))
    assert len(looked_up) == len(requests)
    # Behind other tokens of vLLM's own something else may be found.
    assert side.num_new_matched_tokens(requests[-1], 32) == 0


def test_only_so_many_requests_have_chunks_pinned_at_a_time(clock: Clock) -> None:
    side, ranks = make(clock)
    compute(side, ranks, Request("a", prompt(1, 37)))
    requests = [Request(str(number), prompt(1, 37)) for number in range(MOST_AT_A_TIME + 1)]
    for _ in range(3):
        answers = [side.num_new_matched_tokens(request, 0) for request in requests]
        ranks.answer(side.orders(output({})))
    assert answers == [32] * MOST_AT_A_TIME + [None]
    side.allocated(requests[0], (), 32)
    ranks.answer(side.orders(output({"0": (32, 5)})))
    assert asked(side, ranks, requests[-1]) == 32


def test_what_was_not_promised_is_never_loaded(clock: Clock) -> None:
    side, ranks = make(clock)
    compute(side, ranks, Request("a", prompt(1, 37)))
    with pytest.raises(LwkvError, match="not promised"):
        side.allocated(Request("b", prompt(1, 37)), (), 8)


def test_a_load_without_blocks_for_all_that_it_needs_is_an_error(clock: Clock) -> None:
    side, ranks = make(clock)
    compute(side, ranks, Request("a", prompt(1, 37)))
    request = Request("b", prompt(1, 37))
    side.allocated(request, (), asked(side, ranks, request))
    step = output({"b": (32, 5)})
    nothing = tuple([0] * len(table) for table in tables(37))
    step.kv_connector_block_state = SimpleNamespace(get_block_ids={"b": nothing}.get)
    with pytest.raises(LwkvError, match="no blocks"):
        side.orders(step)


def test_a_preempted_request_stores_again_what_it_computes_again(clock: Clock) -> None:
    side, _ = make(clock)
    request = Request("a", prompt(1, 37))
    assert side.num_new_matched_tokens(request, 0) == 0
    for _ in range(2):
        side.allocated(request, (), 0)
        (store,) = side.orders(output({"a": (0, 20)})).stores
        assert (store.start, store.end) == (0, 16)


@pytest.mark.parametrize("save_decodes", [False, True])
def test_generated_tokens_are_stored_if_that_is_wanted(clock: Clock, save_decodes: bool) -> None:
    side, _ = make(clock, save_decodes=save_decodes)
    request = Request("a", prompt(1, 13))
    assert side.num_new_matched_tokens(request, 0) == 0
    side.allocated(request, (), 0)
    ends = []
    for computed in [0, *range(13, 28)]:
        number = 13 if not computed else 1
        ends += [store.end for store in side.orders(output({"a": (computed, number)})).stores]
        request.all_token_ids.append(7)
    assert ends == ([8, 16, 24] if save_decodes else [8])


@pytest.mark.parametrize("accepted", range(5))
def test_drafts_are_not_stored_before_they_are_accepted(clock: Clock, accepted: int) -> None:
    side, _ = make(clock, save_decodes=True)
    request = Request("a", list(range(13)))
    side.num_new_matched_tokens(request, 0)
    side.allocated(request, tables(13), 0)
    side.orders(output({"a": (0, 13)}))
    request.all_token_ids.append(100)
    # The chunk of tokens 8 to 15 ends with the second of four drafts, whichever of them are right.
    drafts = side.orders(output({"a": (13, 1 + 4)}))
    request.all_token_ids += range(101, 101 + accepted + 1)
    later = side.orders(output({"a": (14 + accepted, 1 + 4)}))
    ends = [[store.end for store in orders.stores] for orders in (drafts, later)]
    assert ends == [[], [16] if 14 + accepted + 1 >= 16 else []]
    assert all(store.boundaries == {16} for store in later.stores)


def test_nothing_is_found_after_a_reset(clock: Clock) -> None:
    side, ranks = make(clock)
    compute(side, ranks, Request("a", prompt(1, 37)))
    side.reset()
    assert asked(side, ranks, Request("b", prompt(1, 37))) == 0
    compute(side, ranks, Request("c", prompt(1, 37)))
    assert asked(side, ranks, Request("d", prompt(1, 37))) == 32


def test_ranks_that_name_chunks_otherwise_are_refused(clock: Clock) -> None:
    side, _ = make(clock, num_ranks=2)
    with pytest.raises(ConfigError, match="same settings"):
        side.introduce(HybridInfo(1, "another chain", CHUNK))
