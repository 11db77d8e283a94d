"""Which blocks a blend may read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lwkv.integrations.vllm.blending.scheduler.settled_blocks import SettledBlocks


def request(name: str, *hashes: bytes) -> Any:
    return SimpleNamespace(request_id=name, block_hashes=list(hashes), num_prompt_tokens=4 * len(hashes))


def step(new: dict[str, tuple[int, int]], cached: dict[str, tuple[int, int]]) -> Any:
    """vLLM's scheduler output: of each request the tokens in place, and those that are scheduled."""
    return SimpleNamespace(
        num_scheduled_tokens={name: number for name, (_, number) in (new | cached).items()},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=computed) for name, (computed, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[computed for computed, _ in cached.values()]
        ),
    )


def test_each_step_settles_what_it_computes() -> None:
    settled = SettledBlocks(4)
    first, second = request("first", b"a", b"b", b"c"), request("second", b"a", b"b", b"c")
    for one in (first, second):
        settled.follow(one)
    settled.note("first", 0)
    settled.pass_step(step({"first": (0, 4), "other": (0, 7)}, {}))
    assert (settled.has(second, 4), settled.has(second, 8)) == (True, False)
    settled.pass_step(step({}, {"first": (4, 4), "another": (9, 1)}))
    assert (settled.has(second, 8), settled.has(second, 12)) == (True, False)
    settled.pass_step(step({}, {"first": (8, 4)}))
    assert settled.has(second, 12)
    settled.forget()
    assert not settled.has(second, 12)
    settled.pass_step(step({}, {"first": (12, 1)}))
    assert settled.has(second, 12)


def test_tokens_that_a_running_request_has_not_computed_yet_are_not_settled() -> None:
    settled = SettledBlocks(4)
    first, second = request("first", b"a", b"b"), request("second", b"a", b"b", b"c")
    for one in (first, second):
        settled.follow(one)
    assert settled.has(second, 8)  # the first one waits: nobody else can have them
    settled.note("first", 0)
    assert not settled.has(second, 8)
    assert not settled.has(second, 4)
    settled.note("first", 4)
    assert settled.has(second, 4)
    assert not settled.has(second, 8)
    settled.note("first", 8)
    assert settled.has(second, 8)


def test_a_request_that_differs_further_on_counts_for_what_both_have() -> None:
    """vLLM may have what comes behind that from a third one, whose first blocks it gave to others."""
    settled = SettledBlocks(4)
    first, second = request("first", b"a", b"b", b"x"), request("second", b"a", b"b", b"c", b"d")
    for one in (first, second):
        settled.follow(one)
    settled.note("first", 5)
    assert settled.has(second, 4)
    assert not settled.has(second, 16)
    settled.note("first", 8)
    assert settled.has(second, 16)


def test_other_tokens_and_its_own_do_not_count() -> None:
    settled = SettledBlocks(4)
    first, second = request("first", b"x", b"y"), request("second", b"a", b"b")
    for one in (first, second):
        settled.follow(one)
        settled.note(one.request_id, 0)
    assert settled.has(second, 8)
    assert settled.has(second, 0)


def test_a_failed_load_makes_nothing_sure() -> None:
    settled = SettledBlocks(4)
    first, second = request("first", b"a"), request("second", b"a")
    for one in (first, second):
        settled.follow(one)
    settled.note("first", 9)
    settled.forget()
    assert not settled.has(second, 4)
    settled.note("first", 9)
    assert settled.has(second, 4)


def test_what_has_ended_is_forgotten_and_its_name_can_be_used_again() -> None:
    settled = SettledBlocks(4)
    settled.follow(request("first", b"a"))
    settled.note("first", 0)
    again, second = request("first", b"a"), request("second", b"a")
    settled.follow(again)
    settled.follow(second)
    assert settled.has(second, 4)
    settled.end("first")
    settled.end("second")
    settled.note("second", 3)
    assert len(settled) == 0
