"""A linker's promises to SGLang: right bytes, all the hits there are, and no more work than that needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from integrations.sglang.fake_sglang import FakeSGLang, PoolTransfer, hashes_of
from oracle import MemoryTier, held_completions, require_rest

from lwkv.integrations.sglang.link import MOST_LENGTHS
from lwkv.integrations.sglang.loads import REST_S
from lwkv.integrations.sglang.page_keys import page_keys
from lwkv.pipeline.pinned_load import PinnedLoad
from lwkv.platforms import CopyBatch
from lwkv.storage import Status

Make = Callable[..., FakeSGLang]
PAGE = 4
A = list(range(100, 121))  # five pages, and a token
B = A[:12] + list(range(200, 211))  # three pages of A, then two others and three tokens


@pytest.mark.parametrize("form", ["sglang_kv", "sglang_kv_hnd", "sglang_mla"])
@pytest.mark.parametrize("page", [1, 3, 4])
def test_what_was_given_away_comes_back_in_every_layer(make: Make, form: str, page: int) -> None:
    sglang = make(form, page, device_pages=64)
    (first,) = sglang.run(A)
    assert (first.from_device, first.from_host) == (0, 0)
    sglang.evict()
    (again,) = sglang.run(A)
    assert (again.from_device, again.from_host) == (0, 20 // page)
    sglang.oracle.check()


@pytest.mark.parametrize("form", ["sglang_kv", "sglang_kv_hnd", "sglang_mla"])
def test_rows_of_a_byte_come_back(make: Make, form: str) -> None:
    """SGLang keeps FP8 as uint8."""
    sglang = make(form, dtype=torch.uint8)
    sglang.run(A)
    sglang.evict()
    (again,) = sglang.run(A)
    assert again.from_host == 5


@pytest.mark.parametrize("form", ["sglang_kv", "sglang_kv_hnd", "sglang_mla"])
def test_layers_of_draft_models_come_back_with_the_last_of_the_target(make: Make, form: str) -> None:
    sglang = make(form, drafts=2)
    sglang.run(A, B)
    sglang.evict()
    one, other = sglang.run(A, B)
    assert (one.from_host, other.from_host) == (5, 5)


@pytest.mark.parametrize(("layers", "drafts"), [(4, 1), (4, 4), (5, 6)])
def test_drafts_are_waited_for_where_layers_of_the_target_arrive_together(
    make: Make, monkeypatch: pytest.MonkeyPatch, layers: int, drafts: int
) -> None:
    sglang = make(
        layers=layers, drafts=drafts, late=False, pages=64 * (layers + drafts), staging_bytes=1 << 20
    )
    platform, load_batch = sglang.oracle.platform, sglang.oracle.platform.load_batch
    sglang.run(A)
    sglang.evict()
    waited: list[int] = []

    def wait(load: PinnedLoad, layer: int) -> int:
        waited.append(layer)
        return wait_for(load, layer)

    wait_for = PinnedLoad.wait
    monkeypatch.setattr(PinnedLoad, "wait", wait)
    if platform.name == "cpu":

        def slowly(*arguments: Any) -> None:
            platform.launch(arguments[-1], lambda *_: time.sleep(0.02))
            load_batch(*arguments)

        monkeypatch.setattr(platform, "load_batch", slowly)
    (again,) = sglang.run(A)
    assert again.from_host == 5
    assert waited[-1] == layers + drafts - 1
    sglang.oracle.check()


def test_only_what_the_device_lacks_is_asked_for_and_loaded(make: Make) -> None:
    sglang = make()
    sglang.run(A)
    sglang.evict(2)
    (again,) = sglang.run(A)
    assert (again.from_device, again.from_host) == (3, 2)
    assert sglang.engine.stats()["tokens_retrieved"] == 2 * PAGE


def test_requests_of_a_batch_share_one_transfer_a_layer(make: Make) -> None:
    sglang = make(staging_bytes=1 << 20)
    sglang.run(A, B)
    sglang.evict()
    with counted(sglang, "load_batch") as batches:
        one, other = sglang.run(A, B)
    assert (one.from_host, other.from_host) == (5, 5)
    assert len(batches) == sglang.oracle.dims.layers


def test_what_is_moved_is_what_is_needed(make: Make) -> None:
    sglang = make(staging_bytes=1 << 20)
    page_bytes = sglang.engine.connector.page_bytes * sglang.oracle.dims.layers
    with counted(sglang, "save_batch") as saved:
        sglang.run(A, B)
    # Five pages of A and the two of B that A has not: the others are the same.
    assert num_bytes(saved) == 7 * page_bytes
    sglang.evict()
    with counted(sglang, "load_batch") as loaded, counted(sglang, "save_batch") as saved:
        sglang.run(A)
    assert num_bytes(loaded) == 5 * page_bytes
    assert saved == []
    assert sglang.results == [True, True, True]


def test_slots_never_leave_the_device(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sglang = make()
    sglang.run(A)
    sglang.evict()
    prompt = sglang.prompt(A)
    sglang.match(prompt)
    sglang.admit(prompt)
    for name in ("cpu", "tolist", "item", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, refused(name))
    assert sglang.link.start_layer_wise_loading() == 0
    monkeypatch.undo()
    sglang.link.finish_layer_wise_loading(0)
    sglang._abort(prompt)


def test_waits_that_come_again_or_for_a_batch_that_is_over_do_nothing(make: Make) -> None:
    sglang = make()
    sglang.run(A)
    sglang.evict()
    (loaded,) = sglang.run(A)
    assert loaded.from_host == 5
    with counted(sglang, "wait_event") as waits, counted(sglang, "load_batch") as loads:
        sglang.decode(0)
        sglang.decode(-1)
    assert (waits, loads) == ([], [])


def test_a_number_that_was_waited_for_before_its_batch_has_begun_is_waited_for(make: Make) -> None:
    sglang = make()
    sglang.run(A)
    sglang.evict()
    sglang.decode(0)
    (loaded,) = sglang.run(A)
    assert (loaded.from_host, sglang.aborted) == (5, [])


def test_a_step_without_loads_has_no_batch(make: Make) -> None:
    sglang = make()
    assert sglang.link.start_layer_wise_loading() == -1
    assert sglang.link.finish_layer_wise_loading(-1)


def test_the_host_never_waits_for_the_device_around_a_forward_pass(make: Make) -> None:
    sglang = make()
    sglang.run(A)
    sglang.evict()
    prompt = sglang.prompt(A)
    sglang.match(prompt)
    sglang.admit(prompt)
    with held_completions(sglang.engine):
        sglang.forward([prompt])
    sglang.tick()
    assert sglang.aborted == []


def test_a_model_that_does_not_wait_for_every_layer_is_not_believed_and_nothing_is_offered_any_more(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sglang = make()
    sglang.run(A)
    sglang.evict()
    prompt = sglang.prompt(A)
    sglang.match(prompt)
    sglang.admit(prompt)
    sglang.expects_failure = True
    sglang.forward([prompt], waits=0)
    assert sglang.aborted == [prompt]
    assert "waited for 0 of 3 layers" in caplog.text
    monkeypatch.setattr(sglang.link._loads, "_clock", lambda: 1e9)
    (computed,) = sglang.run(A)
    assert computed.from_host == 0


def test_after_a_load_that_the_device_fails_prompts_are_computed_for_a_while(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sglang = make()
    sglang.run(A)
    sglang.evict()
    prompt = sglang.prompt(A)
    sglang.match(prompt)
    sglang.admit(prompt)
    sglang.expects_failure = True
    with monkeypatch.context() as patch:
        patch.setattr(sglang.engine.connector.loader, "load_layer", fail)
        sglang.forward([prompt])
    sglang.expects_failure = False
    assert sglang.aborted == [prompt]
    (computed,) = sglang.run(A)
    assert computed.from_host == 0
    sglang.evict()
    now = sglang.link._loads._clock()
    monkeypatch.setattr(sglang.link._loads, "_clock", lambda: now + REST_S)
    (loaded,) = sglang.run(A)
    assert loaded.from_host == 5


def test_a_replayed_graph_waits_for_the_last_layer_alone(make: Make) -> None:
    sglang = make()
    sglang.run(A)
    sglang.evict()
    prompt = sglang.prompt(A)
    sglang.match(prompt)
    sglang.admit(prompt)
    index = sglang.link.start_layer_wise_loading()
    sglang.counter.set_consumer(index)
    with sglang.platform.use_stream(sglang.stream):
        sglang.counter.wait_until(sglang.counter.num_layers - 1)
        for layer in range(sglang.oracle.dims.layers):
            sglang._compute(prompt, layer)
    assert sglang.link.finish_layer_wise_loading(index)
    sglang._insert(prompt)


def test_a_request_that_is_looked_up_again_and_again_pins_its_pages_once(make: Make) -> None:
    sglang = make()
    sglang.run(A)
    sglang.evict()
    prompt = sglang.prompt(A)
    for _ in range(3):
        assert sglang.match(prompt) == 5
    assert sglang.engine.stats()["pins"] == 5
    sglang.admit(prompt)
    sglang.forward([prompt])
    sglang.tick()
    require_rest(sglang.engine)


def test_a_waiting_request_is_offered_what_has_come_meanwhile(make: Make) -> None:
    sglang = make()
    waiting = sglang.prompt([*A, *A])
    assert sglang.match(waiting) == 0
    sglang.run(A[:12])
    sglang.evict()
    assert sglang.match(waiting) == 3
    sglang.run([*A, *A])
    sglang.evict()
    assert sglang.match(waiting) == 10


def test_a_load_that_is_cancelled_gives_its_pins_back(make: Make) -> None:
    sglang = make()
    sglang.run(A)
    sglang.evict()
    prompt = sglang.prompt(A)
    sglang.match(prompt)
    sglang.admit(prompt)
    assert sglang.link.cancel_queued_load(prompt.rid)
    assert not sglang.link.cancel_queued_load(prompt.rid)
    assert sglang.link.start_layer_wise_loading() == -1
    require_rest(sglang.engine)


@pytest.mark.parametrize("others_have", [0, 1, 4, 5])
def test_several_ranks_load_what_all_of_them_have(make: Make, others_have: int) -> None:
    sglang = make(num_ranks=2)
    sglang.run(A)
    sglang.evict()
    sglang.others_have = others_have
    (again,) = sglang.run(A)
    assert again.from_host == others_have
    sglang.link.reset()
    require_rest(sglang.engine)


@pytest.mark.parametrize("num_pages", [1, 127, 128, 129, 300, 1024])
def test_several_ranks_give_few_hits_and_lose_little_where_they_differ(make: Make, num_pages: int) -> None:
    link = make(num_ranks=2).link
    answers = [link._lengths(length, num_pages) for length in range(num_pages + 1)]
    assert max(map(len, answers)) <= MOST_LENGTHS + 1
    for length, lengths in enumerate(answers):
        assert lengths[-1:] == ([length] if length else [])
        shorter = answers[length // 2]
        common = max({0, *lengths} & {0, *shorter})
        assert length // 2 - common <= num_pages // MOST_LENGTHS


def test_a_load_whose_promise_has_ended_is_computed(make: Make) -> None:
    sglang = make()
    sglang.run(A)
    sglang.evict()
    prompt = sglang.prompt(A)
    assert sglang.match(prompt) == 5
    sglang.link._promises.clear()
    sglang.admit(prompt)
    assert prompt.from_host == 0
    sglang.forward([prompt])
    assert sglang.aborted == []


def test_with_several_ranks_a_load_whose_promise_has_ended_fails_when_it_ends(make: Make) -> None:
    sglang = make(num_ranks=2)
    sglang.run(A)
    sglang.evict()
    prompt = sglang.prompt(A)
    sglang.match(prompt)
    sglang.link._promises.clear()
    sglang.admit(prompt)
    sglang.expects_failure = True
    sglang.forward([prompt])
    assert sglang.aborted == [prompt]


def test_salts_have_caches_of_their_own(make: Make) -> None:
    sglang = make()
    sglang.run(A, salt="one")
    sglang.evict()
    assert sglang.match(sglang.prompt(A)) == 0
    assert sglang.match(sglang.prompt(A, "two")) == 0
    (loaded,) = sglang.run(A, salt="one")
    assert loaded.from_host == 5


def test_a_flush_forgets_everything(make: Make) -> None:
    sglang = make()
    sglang.run(A)
    sglang.flush()
    (computed,) = sglang.run(A)
    assert computed.from_host == 0
    sglang.evict()
    (loaded,) = sglang.run(A)
    assert loaded.from_host == 5


def test_a_flush_forgets_nothing_where_the_user_says_so(make: Make) -> None:
    sglang = make(forgets=False)
    sglang.run(A)
    sglang.flush()
    (loaded,) = sglang.run(A)
    assert loaded.from_host == 5


def test_nothing_is_read_after_a_reset(make: Make) -> None:
    sglang = make()
    prompt = sglang.prompt(A)
    sglang.match(prompt)
    sglang.admit(prompt)
    sglang.forward([prompt])  # its pages are given away, and not yet read
    sglang.link.reset()
    with counted(sglang, "save_batch") as saved:
        assert sglang.link.num_completed_offloads() == 0
        assert sglang.engine.flush()
    assert saved == []
    assert sglang.link.num_completed_offloads() == 0


def test_a_reset_waits_for_what_is_read(make: Make) -> None:
    sglang = make()
    prompt = sglang.prompt(A)
    sglang.match(prompt)
    sglang.admit(prompt)
    sglang.forward([prompt])
    sglang.link.num_completed_offloads()
    sglang.link.reset()
    require_rest(sglang.engine)
    assert sglang.link.num_completed_offloads() == 0


def test_a_reset_ends_a_batch_whose_model_never_ran_and_goes_on_offering(make: Make) -> None:
    sglang = make(forgets=False)
    sglang.run(A)
    sglang.evict()
    prompt = sglang.prompt(A)
    sglang.match(prompt)
    sglang.admit(prompt)
    index = sglang.link.start_layer_wise_loading()
    sglang.link.reset()
    require_rest(sglang.engine)
    sglang._abort(prompt)
    assert sglang.link.finish_layer_wise_loading(index)
    (loaded,) = sglang.run(A)
    assert loaded.from_host == 5


def test_pages_that_cannot_be_stored_are_given_back(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sglang = make()
    with monkeypatch.context() as patch:
        patch.setattr(sglang.engine, "storing", fail)
        sglang.run(A)
    assert sglang.results == [False]
    assert "pages are not stored: RuntimeError" in caplog.text
    sglang.run(B)
    assert sglang.results == [False, True]


def test_offloads_complete_in_their_order(make: Make) -> None:
    sglang = make()
    with held_completions(sglang.engine):
        batch = [sglang.prompt(tokens) for tokens in (A, B)]
        for prompt in batch:
            sglang.match(prompt)
            sglang.admit(prompt)
        sglang.forward(batch)
        assert [sglang.link.num_completed_offloads() for _ in range(3)] == [0, 0, 0]
    assert sglang.tick() == 2
    assert sglang.results == [True, True]


def test_what_finds_no_room_is_not_said_to_be_stored(make: Make) -> None:
    sglang = make(pages=3 * 4)  # four pages of SGLang
    sglang.run(A)
    assert sglang.results == [False]
    sglang.evict()
    (again,) = sglang.run(A)
    assert again.from_host == 4


def test_while_frozen_nothing_is_stored(make: Make) -> None:
    sglang = make()
    sglang.engine.freeze()
    sglang.run(A)
    assert sglang.results == [False]
    sglang.engine.freeze(False)
    sglang.evict()
    (again,) = sglang.run(A)
    assert again.from_host == 0


def test_eviction_leaves_what_a_cache_of_the_same_room_would_have(make: Make) -> None:
    sglang = make(pages=3 * 8)  # eight pages of SGLang
    sglang.run(A)
    sglang.evict()
    sglang.run(list(range(300, 321)))
    sglang.evict()
    (again,) = sglang.run(A)
    assert again.from_host == 3  # the five latest pages are those of the other prompt


def test_a_prompt_that_is_given_away_in_parts_is_evicted_from_its_end(make: Make) -> None:
    sglang = make()
    prompt = sglang.prompt(A)
    sglang.match(prompt)
    prompt.pages = sglang.take(6)
    sglang.oracle.compute(A, sglang._slots(prompt.pages).tolist()[: len(A)])
    for part in (slice(0, 2), slice(2, 5)):
        sglang.link.offload([PoolTransfer(prompt.hashes[part], sglang._slots(prompt.pages[part]))])
        sglang.pending.append(prompt.hashes[part])
        sglang.tick()
    host = sglang.engine.parts().storage.host
    assert host.evict(2 * sglang.engine.num_layers)
    assert host.contains(page_keys(sglang.link.namespace, prompt.hashes)) == [True] * 3 + [False] * 2


class TestLowerTiers:
    def test_what_a_lower_tier_has_is_offered_when_it_is_in_host_memory(self, make: Make) -> None:
        tier = MemoryTier()
        make(tiers=[tier]).run(A)
        sglang = make(tiers=[tier])
        prompt = sglang.prompt(A)
        assert sglang.match(prompt) == 0
        assert sglang.link._bring_up.wait_idle(10)
        assert sglang.match(prompt) == 5
        sglang.admit(prompt)
        sglang.forward([prompt])
        assert prompt.from_host == 5

    def test_a_lookup_waits_for_no_tier(self, make: Make) -> None:
        tier = MemoryTier()
        make(tiers=[tier]).run(A)
        sglang = make(tiers=[tier])
        tier.gate.clear()
        prompt = sglang.prompt(A)
        assert [sglang.match(prompt) for _ in range(3)] == [0, 0, 0]
        sglang.admit(prompt)
        sglang.forward([prompt])
        tier.gate.set()
        assert sglang.link._bring_up.wait_idle(10)
        assert sglang.aborted == []

    def test_a_tier_is_asked_once_for_a_request(self, make: Make) -> None:
        tier = MemoryTier()
        make(tiers=[tier]).run(A)
        sglang = make(tiers=[tier])
        tier.asked.clear()
        prompt = sglang.prompt(A)
        for _ in range(3):
            sglang.match(prompt)
            assert sglang.link._bring_up.wait_idle(10)
        layers = sglang.oracle.dims.layers
        assert len(tier.asked) == 5 * layers
        chunks = [key.chunk for key in tier.asked]
        assert all(len({*chunks[i : i + layers]}) == 1 for i in range(0, len(chunks), layers)), "by one call"

    @pytest.mark.parametrize("status", [Status.ERROR, Status.MISS])
    def test_what_a_tier_does_not_bring_is_computed(self, make: Make, status: Status) -> None:
        tier = MemoryTier()
        make(tiers=[tier]).run(A)
        sglang = make(tiers=[tier])
        third = bytes.fromhex(hashes_of(A, PAGE)[2])[:16]
        tier.fails = lambda key: status if key.chunk.hash == third and key.layer == 1 else Status.OK
        prompt = sglang.prompt(A)
        sglang.match(prompt)
        assert sglang.link._bring_up.wait_idle(10)
        assert sglang.match(prompt) == 2
        sglang.admit(prompt)
        sglang.forward([prompt])
        assert sglang.aborted == []


def test_a_lookup_of_nothing_is_answered(make: Make) -> None:
    assert make().link.lookup("r", [PoolTransfer([])]) == []


@contextmanager
def counted(sglang: FakeSGLang, method: str) -> Iterator[list[Any]]:
    """The arguments of every call of a method of the platform inside; copies of tables are left out."""
    calls: list[Any] = []
    platform, connector = sglang.platform, sglang.engine.connector
    lanes = (connector.loader.lane, connector.saver.lane)
    staging = {buffer.memory.data_ptr() for lane in lanes for buffer in lane.buffers}
    original = getattr(platform, method)

    def call(*arguments: Any) -> Any:
        if method == "wait_event" or arguments[0].data_ptr() in staging:
            calls.append(arguments)
        return original(*arguments)

    setattr(platform, method, call)
    try:
        yield calls
    finally:
        delattr(platform, method)


def num_bytes(calls: list[Any]) -> int:
    return sum(int(batch.sizes.sum()) for call in calls for batch in call if isinstance(batch, CopyBatch))


def fail(*_: object) -> None:
    raise RuntimeError("the device fails")


def refused(name: str) -> Callable[..., Any]:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError(f"Tensor.{name} was called: it waits for the device")

    return refuse
