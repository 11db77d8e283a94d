"""Which boundary is fetched for a request, and what of each kind."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from integrations.vllm.hybrid.test_rank_tiers import CHUNK, HASHES, KINDS, Ranks, info

from lwkv.integrations.vllm.hybrid.boundary_fetches import BoundaryFetches
from lwkv.integrations.vllm.hybrid.kind_places import KindPlaces
from lwkv.integrations.vllm.orders import Fetch, unpacked
from lwkv.integrations.vllm.scheduler.lookup.waiting_loads import WaitingLoads
from lwkv.kinds import KindIndex
from lwkv.telemetry.counters import Counters

DISK: list[str | None] = ["disk"] * 4
NOWHERE: list[str | None] = [None] * 4


def fetched(
    tiers: Sequence[Sequence[str | None]],
    in_host: Sequence[int] = (0, 0),
    max_pages: int = 40,
    num_local: int = 0,
) -> list[tuple[str, int, int]]:
    """By its namespace, the first and the last chunk of each text that is fetched, the last one left out.

    Args:
        tiers: by kind and chunk. in_host: of each kind how many leading chunks are in host memory.
    """
    ranks, index = Ranks(info(0, max_pages)), KindIndex(KINDS, CHUNK, 1)
    index.introduce(0)
    for kind, number in enumerate(in_host):
        index.kept(0, kind, HASHES[:number])
    waiting = WaitingLoads(1, 5.0, Counters(), lambda: 0.0)
    fetches = BoundaryFetches(index, ranks.tiers, waiting, None, lambda: 0.0)
    fetches.begin("a", KindPlaces(KINDS, CHUNK, HASHES, tiers), 4 * CHUNK + 1, num_local, 0.0)
    waiting.waits("a", ranks.tiers.most_room)
    return [described(fetch) for fetch in waiting.orders()[0]]


def described(fetch: Fetch) -> tuple[str, int, int]:
    keys = unpacked(*fetch.keys[0])
    numbers = [HASHES.index(key.hash) for key in keys[fetch.first :]]
    return keys[0].namespace, numbers[0], numbers[-1] + 1


def test_all_of_full_attention_is_fetched_and_of_states_that_of_the_boundary() -> None:
    assert fetched([DISK, DISK]) == [("states of 0", 3, 4), ("full of 0", 0, 4)]


def test_what_vllm_has_itself_is_not_fetched() -> None:
    assert fetched([DISK, DISK], num_local=2 * CHUNK) == [("states of 0", 3, 4), ("full of 0", 2, 4)]


@pytest.mark.parametrize(
    "tiers", [[NOWHERE, DISK], [["host", "host", None, None], ["host", "host", "disk", "disk"]]]
)
def test_nothing_is_fetched_where_host_memory_has_the_largest_boundary(
    tiers: Sequence[Sequence[str | None]],
) -> None:
    in_host = [sum(tier == "host" for tier in own) for own in tiers]
    assert fetched(tiers, in_host) == []


def test_a_boundary_that_half_of_host_memory_has_no_room_for_is_not_fetched() -> None:
    """A chunk of full attention takes four pages, a state one."""
    assert fetched([DISK, DISK], max_pages=2 * 17) == [("states of 0", 3, 4), ("full of 0", 0, 4)]
    assert fetched([DISK, DISK], max_pages=2 * 17 - 1) == [("states of 0", 2, 3), ("full of 0", 0, 3)]
