"""The Mooncake tier with a real master and two nodes: what it takes for a page, and how it is reached."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from storage.places import make_setup, open_only
from storage.remote_place import ALL, LAYERS, LONG_S, PAGE_BYTES, Place, page_of
from storage.rig import key, keys
from storage.servers import (
    Server,
    free_port,
    mooncake_master,
    mooncake_node,
    mooncake_program,
    running,
    wait_until,
)

from lwkv.config.settings import Config
from lwkv.errors import ConfigError
from lwkv.keys import ChunkKey, LayerKey
from lwkv.storage import Status, Tier
from lwkv.storage.remote.mooncake.client import MooncakeStore, import_mooncake, read_address
from lwkv.storage.remote.mooncake.tier import MOST_CALLS, examine, lock_limit_warning, open_tier
from lwkv.storage.remote.remote_url import parse_remote_url
from lwkv.storage.remote.seal import MOST_SEAL_BYTES
from lwkv.storage.tier import WARNING, Ordered

MIB = 1 << 20
OBJECT_BYTES = PAGE_BYTES + MOST_SEAL_BYTES


@pytest.fixture
def place(mooncake: Server) -> Iterator[Place]:
    opened = Place(f"mooncake://127.0.0.1:{mooncake.port}")
    opened.store(1, 2)
    yield opened
    opened.tier.close()


def test_a_prompt_is_leased_from_its_end_when_it_is_used_and_when_it_is_written(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    exist = MooncakeStore.exist

    def note(client: MooncakeStore, names: Sequence[str]) -> list[int]:
        asked.append(list(names))
        return exist(client, names)

    monkeypatch.setattr(MooncakeStore, "exist", note)
    assert isinstance(place.tier, Ordered)
    place.tier.follow(keys(1, 2, 3), LONG_S)
    place.store(3)
    one_by_one = [[f"lwkv.{LayerKey(key(number), 0).to_string()}"] for number in (3, 2, 1)]
    assert asked == 2 * one_by_one
    place.store(3)
    assert asked == 2 * one_by_one, "once is enough"
    place.tier.follow(keys(*range(1000)), LONG_S)
    assert len(asked) == len(2 * one_by_one) + MOST_CALLS
    assert not place.there(3, 4)[1]


LEASE_MS = 100


def test_a_store_that_is_full_evicts_a_prompt_from_its_end(tmp_path: Path) -> None:
    """One that was stored at once: the master does not renew leases of earlier steps, see docs/remote.md."""
    lease = f"--default_kv_lease_ttl={LEASE_MS}"
    master = mooncake_master(mooncake_program(), tmp_path / "master", lease)
    prompt = keys(*range(1000, 1024))
    with running(master, mooncake_node(master, tmp_path / "node")):
        url = f"mooncake://127.0.0.1:{master.port}"
        tier = open_only(make_setup(MIB, 1), remote_url=url)
        assert isinstance(tier, Ordered)
        tier.follow(prompt, LONG_S)
        for chunk in prompt:
            assert is_put(tier, chunk)
        time.sleep(2 * LEASE_MS / 1000)  # until then what is leased is younger than what is written now
        for foreign in keys(*range(2000, 2045)):
            wait_until(partial(is_put, tier, foreign), "the store to make room")
        there = tier.contains(prompt, LONG_S)
        assert 0 < sum(there) < len(prompt)
        # Two chunks are leased in one call, so that either may go before the other.
        assert there.index(False) >= sum(there) - 1
        tier.close()


def is_put(tier: Tier, chunk: ChunkKey) -> bool:
    return tier.put([LayerKey(chunk, 0)], [torch.ones(MIB, dtype=torch.uint8)], LONG_S) == [Status.OK]


class Objects:
    """What is in the store, as any other process in the network has it."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self._memory = torch.zeros(2 * OBJECT_BYTES, dtype=torch.uint8)
        assert store.register_buffer(self._memory.data_ptr(), self._memory.nbytes) == 0

    def remove(self, name: str) -> None:
        assert self.store.remove(name, True) == 0

    def replace(self, name: str, content: bytes) -> None:
        self.remove(name)
        self._memory[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        assert self.store.put_from(name, self._memory.data_ptr(), len(content)) == 0

    def read(self, name: str) -> bytes:
        length = self.store.get_into(name, self._memory.data_ptr(), OBJECT_BYTES)
        return self._memory[:length].numpy().tobytes()

    def close(self) -> None:
        self.store.unregister_buffer(self._memory.data_ptr())


@pytest.fixture
def objects(mooncake_clients: list[MooncakeStore]) -> Iterator[Objects]:
    objects = Objects(mooncake_clients[0]._store)
    yield objects
    objects.close()


def name_of(number: int, layer: int) -> str:
    return f"lwkv.{LayerKey(key(number), layer).to_string()}"


def bytes_of(number: int, layer: int) -> bytes:
    return page_of(LayerKey(key(number), layer)).numpy().tobytes()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(bytes(OBJECT_BYTES), id="zeros"),
        pytest.param(bytes_of(1, 1) + bytes(MOST_SEAL_BYTES), id="without a seal"),
        pytest.param(bytes_of(1, 1) + b"lwkv1 of mine".ljust(MOST_SEAL_BYTES), id="with another seal"),
    ],
)
def test_what_is_not_what_was_put_is_a_miss_and_its_chunk_is_not_promised_again(
    place: Place, objects: Objects, content: bytes
) -> None:
    objects.replace(name_of(1, 1), content)
    assert place.load(1, 2) == [[Status.OK, Status.MISS, Status.OK], ALL]
    assert place.counted() == {"mooncake_spoiled": 1}
    assert place.there(1, 2) == [False, True]
    place.store(1)
    assert (place.there(1), place.load(1)) == ([True], [ALL])


def test_another_chunks_object_is_not_taken_for_ones_own(place: Place, objects: Objects) -> None:
    objects.replace(name_of(1, 1), objects.read(name_of(2, 1)))
    assert place.load(1, 2) == [[Status.OK, Status.MISS, Status.OK], ALL]


@pytest.mark.parametrize("num_bytes", [1, OBJECT_BYTES - 1, OBJECT_BYTES + 1])
def test_an_object_of_another_size_is_removed(place: Place, objects: Objects, num_bytes: int) -> None:
    objects.replace(name_of(1, 1), bytes(num_bytes))
    assert place.load(1) == [[Status.OK, Status.MISS, Status.OK]]
    assert place.there(1) == [False]
    place.store(1)
    assert place.load(1) == [ALL]


def test_a_store_that_is_full_evicts_whole_chunks(tmp_path: Path) -> None:
    """Even where layer 0 was looked up again and again, and the others never."""
    master = mooncake_master(mooncake_program(), tmp_path, "--default_kv_lease_ttl=100")
    big, numbers = 1 << 20, range(100)
    with running(master):
        setup = make_setup(big, LAYERS)
        place = Place(f"mooncake://127.0.0.1:{master.port}?segment_gib=0.125", setup)
        pages = [torch.zeros(big, dtype=torch.uint8) for _ in range(LAYERS)]
        for number in numbers:
            asked = key(number).split_layers(LAYERS)
            if place.tier.put(asked[1:], pages[1:], 10.0) == ALL[1:]:  # else no room was made for it in time
                place.tier.put(asked[:1], pages[:1], 10.0)
            place.there(*range(0, number, 3))
        store = place.tier._store  # type: ignore[attr-defined]
        there = [store.exist([name_of(number, layer) for layer in range(LAYERS)]) for number in numbers]
        visible = [layers for layers in there if layers[0]]
        assert 0 < len(visible) < len(numbers)
        assert visible == [[1] * LAYERS] * len(visible)
        place.tier.close()


def test_a_process_keeps_its_chunks_in_the_memory_that_it_lends(mooncake: Server, place: Place) -> None:
    lender = Place(f"mooncake://127.0.0.1:{mooncake.port}?segment_gib=0.0625")
    lender.store(*range(10, 30))
    lender.tier.close()
    wait_until(lambda: not any(place.there(*range(10, 30))), "what it lent to be gone")
    assert place.load(1, 2) == [ALL, ALL], "the others lost nothing"


def test_a_page_that_is_evicted_after_the_lookup_is_a_miss(place: Place, objects: Objects) -> None:
    assert place.there(1, 2) == [True, True]
    objects.remove(name_of(2, 1))
    assert place.load(1, 2) == [ALL, [Status.OK, Status.MISS, Status.OK]]
    assert place.counted() == {"mooncake_vanished": 1}
    assert not objects.store.is_exist(name_of(2, 0))


def test_pages_of_one_slab_are_registered_once(place: Place) -> None:
    slab = torch.zeros(4 * LAYERS, PAGE_BYTES, dtype=torch.uint8)
    for number in (3, 4, 5, 6):
        asked = key(number).split_layers(LAYERS)
        rows = slab[(number - 3) * LAYERS :][:LAYERS]
        for row, each in zip(rows, asked, strict=True):
            row.copy_(page_of(each))
        assert place.tier.put(asked, list(rows), 10.0) == ALL
    registered = place.tier._store._registered  # type: ignore[attr-defined]
    assert list(registered).count(slab.data_ptr()) == 1
    assert place.load(3, 4, 5, 6) == [ALL] * 4


def test_a_process_may_lend_memory_of_its_own(tmp_path: Path) -> None:
    master = mooncake_master(mooncake_program(), tmp_path)
    with running(master):
        poor = Place(f"mooncake://127.0.0.1:{master.port}")
        assert poor.put(1)[0] is Status.ERROR
        assert poor.counted()["mooncake_no_space"] > 0
        rich = Place(f"mooncake://127.0.0.1:{master.port}?segment_gib=0.0625")
        rich.store(1)
        assert (rich.load(1), poor.load(1)) == ([ALL], [ALL])
        for one in (poor, rich):
            one.tier.close()


def test_a_master_that_is_not_there_yet_is_reported_once_and_used_as_soon_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    master = mooncake_master(mooncake_program(), tmp_path)
    place = Place(f"mooncake://127.0.0.1:{master.port}?segment_gib=0.0625")
    assert len(caplog.messages) == 1
    assert "every chunk is a miss there until it answers" in caplog.text
    for call in (lambda: place.there(1), lambda: place.load(1), lambda: place.store(1)):
        with pytest.raises(ConnectionError, match="cannot be reached"):
            call()
    with running(master):
        place.store(1)
        assert place.load(1) == [ALL]
        place.tier.close()


def test_a_client_that_cannot_be_set_up_is_never_asked_for_anything(mooncake: Server) -> None:
    """Asking such a client ends the process."""
    place = Place(f"mooncake://127.0.0.1:{mooncake.port}?metadata=http://127.0.0.1:{free_port()}/metadata")
    for call in (lambda: place.load(1), lambda: place.there(1)):
        with pytest.raises(ConnectionError, match="cannot be set up"):
            call()
    place.tier.close()


def test_time_outs_are_set_unless_the_user_has_set_them(monkeypatch: pytest.MonkeyPatch) -> None:
    mooncake_program()
    monkeypatch.delenv("MC_TCP_PROGRESS_TIMEOUT_SEC", raising=False)
    monkeypatch.setenv("MC_TCP_STATUS_TIMEOUT_SEC", "7")
    import_mooncake(parse_remote_url("mooncake://here", 1, ()))
    wanted = {"MC_TCP_PROGRESS_TIMEOUT_SEC": "2", "MC_TCP_STATUS_TIMEOUT_SEC": "7"}
    assert {name: os.environ[name] for name in wanted} == wanted


def test_without_its_client_the_extra_and_the_library_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(
        ConfigError, match=r"pip install '\.\[mooncake\]' in lwkv's folder; it also needs libibverbs"
    ):
        open_tier("mooncake://here", make_setup(PAGE_BYTES, LAYERS))


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("mooncake://a,b", "the master is one host"),
        ("mooncake://a/b", "the master is one host"),
        ("mooncake://me:secret@a", "Mooncake knows no users"),
        ("mooncake://a?protocol=udp", "protocol is 'udp'; allowed: tcp or rdma"),
        ("mooncake://a?replicas=0", "replicas is '0'"),
        ("mooncake://a?segment_gib=much", "segment_gib is 'much'; allowed: 0 or more"),
        ("mooncake://a?cluster=true", "there is no option 'cluster'; allowed: metadata, protocol"),
    ],
)
def test_an_address_that_cannot_work_is_refused(url: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        read_address(url)
    assert "secret" not in str(refused.value)


def test_the_doctor_is_told_how_the_master_is_and_that_anybody_can_read(mooncake: Server) -> None:
    found = examine(f"mooncake://127.0.0.1:{mooncake.port}", Config())
    assert found["state"].startswith("the master takes connections")
    assert "neither encrypted nor with a password" in found["protocol"]


def test_calls_with_no_keys_do_not_even_connect() -> None:
    mooncake_program()
    place = Place(f"mooncake://127.0.0.1:{free_port()}")
    assert (place.tier.contains([], 1), place.tier.get([], [], 1), place.tier.put([], [], 1)) == ([], [], [])
    place.tier.close()


RDMA = "mooncake://here?protocol=rdma&segment_gib=1"
GIB = 1 << 30


@pytest.mark.parametrize(
    ("url", "most_locked", "warns"),
    [
        (RDMA, 65536, True),
        (RDMA, 3 * GIB - 1, True),
        (RDMA, 3 * GIB, False),
        (RDMA, None, False),
        ("mooncake://here?segment_gib=1", 65536, False),
    ],
)
def test_with_rdma_a_limit_of_locked_memory_that_is_too_low_is_a_warning_that_names_the_keys(
    url: str, most_locked: int | None, warns: bool
) -> None:
    warning = lock_limit_warning(read_address(url), Config(max_local_cpu_size=2), most_locked)
    assert (warning is not None) == warns
    for word in ("remote_url", "max_local_cpu_size", "3.00 GiB", "ulimit -l unlimited") if warns else ():
        assert word in str(warning)


def test_the_warning_about_locked_memory_comes_at_the_start_and_in_the_doctor(
    mooncake: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lwkv.storage.remote.mooncake.tier.read_lock_limit", lambda: 65536)
    url = f"mooncake://127.0.0.1:{mooncake.port}?protocol=rdma"
    open_tier(url, make_setup(PAGE_BYTES, LAYERS)).close()
    (line,) = caplog.messages
    assert "this process may lock 0.00 GiB" in line
    assert "this process may lock 0.00 GiB" in examine(url, Config())[WARNING]
