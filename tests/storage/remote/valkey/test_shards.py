from __future__ import annotations

import pytest
from storage.rig import Clock

from lwkv.storage.remote.valkey.shards import NUM_SLOTS, Shard, Shards, slot_of

THREE = [Shard(0, "a:1"), Shard(5461, "b:1"), Shard(10923, "c:1")]
GONE = ConnectionError("gone")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def three(clock: Clock) -> Shards:
    return Shards(THREE, clock)


def test_slots_are_worked_out_as_servers_do() -> None:
    """The value of `CLUSTER KEYSLOT` for these, and the one in the specification."""
    assert [slot_of(tag) for tag in ("123456789", "foo", "user1000", "")] == [12739, 12182, 3443, 0]


def test_every_key_has_the_server_of_its_slot(three: Shards) -> None:
    tags = [f"k{i}" for i in range(300)]
    wanted = ["abc"[slot_of(tag) * 3 // NUM_SLOTS] + ":1" for tag in tags]
    assert [three.server_of(tag) for tag in tags] == wanted
    assert set(wanted) == {"a:1", "b:1", "c:1"}


def test_a_shard_that_fails_rests_alone_for_longer_and_longer(three: Shards, clock: Clock) -> None:
    for rest_s in (1, 2, 4, 8, 16, 16, 16):
        assert not three.failed("b:1", GONE)
        assert [three.is_resting(server) for server in ("a:1", "b:1", "c:1")] == [False, True, False]
        clock.now += rest_s - 0.25
        assert three.is_resting("b:1")
        clock.now += 0.25
        assert not three.is_resting("b:1")


def test_calls_that_were_under_way_do_not_lengthen_the_rest(three: Shards, clock: Clock) -> None:
    for _ in range(5):
        three.failed("b:1", GONE)
    clock.now += 1
    assert not three.is_resting("b:1")


def test_an_answer_ends_the_row(three: Shards, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        three.failed("b:1", GONE)
        clock.now += 60
    with caplog.at_level("INFO"):
        three.answered("b:1")
    three.answered("a:1")
    assert caplog.messages == [
        "b:1 does not serve its part of the cluster: gone",
        "b:1 serves its part of the cluster again",
    ]
    three.failed("b:1", GONE)
    clock.now += 1
    assert not three.is_resting("b:1")


def test_it_is_reported_when_no_shard_is_left(three: Shards, clock: Clock) -> None:
    assert [three.failed(server, GONE) for server in ("a:1", "c:1", "b:1")] == [False, False, True]
    clock.now += 1
    assert not three.failed("a:1", GONE)


def test_a_store_of_one_shard_never_rests(clock: Clock) -> None:
    one = Shards([Shard(0, "the server")], clock)
    assert one.failed(one.server_of("x"), GONE)
    assert not one.is_resting("the server")


def test_shards_may_move(three: Shards) -> None:
    three.failed("b:1", GONE)
    three.replace([Shard(8000, "b:1"), Shard(0, "d:1")])
    assert {three.server_of(f"k{i}") for i in range(100)} == {"b:1", "d:1"}
    assert three.is_resting("b:1")
