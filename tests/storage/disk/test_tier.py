"""The disk tier beyond what every tier promises: files that went bad, room, other processes."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from storage.disk_rig import FORM, DiskRig, in_another_form, opened
from storage.places import make_setup, open_only
from storage.rig import NUM_LAYERS, PAGE_BYTES, key, keys
from storage.tier_calls import layer_keys, load, put, store

from lwkv.config.settings import Config
from lwkv.errors import ConfigError
from lwkv.storage import Status
from lwkv.storage.disk import folder, io, lru, names, reader, writer
from lwkv.storage.disk import tier as disk_tier
from lwkv.storage.disk.lock import locked

ALL_LAYERS = range(NUM_LAYERS)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DiskRig]:
    with opened(tmp_path) as rig:
        yield rig


# restarts


def test_the_index_is_rebuilt_without_reading_payloads(rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    store(rig.open(), *keys(1, 2, 3))
    with monkeypatch.context() as blind:
        for name in ("read_pages", "read_bytes"):
            blind.setattr(reader, name, lambda *_: pytest.fail("a file was read"))
        after = rig.open()
        assert after.contains(keys(1, 2, 3, 4), 1) == [True, True, True, False]
        assert after.gauges() == {"files": 3, "used_bytes": 3 * FORM.file_bytes}
    assert all(rig.is_whole(after, chunk) for chunk in keys(1, 2, 3))


def test_what_a_dead_writer_left_is_removed_and_what_a_living_one_writes_is_not(rig: DiskRig) -> None:
    living = rig.open()
    put(living, key(1), range(1, NUM_LAYERS))
    left = rig.folder / f"{key(2).to_string()}.tmp-123-0123abcd"
    left.write_bytes(bytes(FORM.file_bytes))
    rig.open()
    assert not left.exists()
    assert rig.used() == FORM.file_bytes
    assert rig.counters.totals() == {"disk_leftovers": 1}
    assert put(living, key(1), [0]) == [Status.OK]
    assert rig.is_whole(rig.open(), key(1))


def test_close_removes_what_was_begun(rig: DiskRig) -> None:
    tier = rig.open()
    put(tier, key(1), range(1, NUM_LAYERS))
    put(tier, key(1), range(1, NUM_LAYERS))
    assert rig.used() == FORM.file_bytes
    tier.close()
    assert (rig.names(), rig.used()) == ([], 0)


def test_layer_0_alone_makes_no_chunk(rig: DiskRig) -> None:
    tier = rig.open()
    assert put(tier, key(1), [0]) == [Status.ERROR]
    put(tier, key(1), [1])
    assert put(tier, key(1), [0]) == [Status.ERROR]
    assert (rig.names(), rig.used()) == ([], 0)


def test_a_chunk_can_be_put_in_one_call(rig: DiskRig) -> None:
    assert put(rig.open(), key(1), ALL_LAYERS) == [Status.OK] * NUM_LAYERS
    assert rig.is_whole(rig.open(), key(1))


# files that are not what was written


@given(place=st.integers(0, FORM.file_bytes - 1), flip=st.integers(1, 255))
@settings(max_examples=60, deadline=None)
def test_a_byte_that_went_bad_is_a_miss_or_does_not_matter(
    tmp_path_factory: pytest.TempPathFactory, place: int, flip: int
) -> None:
    with opened(tmp_path_factory.mktemp("rot")) as rig:
        store(rig.open(), key(1))
        data = bytearray(rig.path(key(1)).read_bytes())
        data[place] ^= flip
        rig.path(key(1)).write_bytes(data)
        tier = rig.open()
        statuses = [load(tier, layer_keys(key(1), [layer]))[0] for layer in ALL_LAYERS]
        matters = place < FORM.header_bytes or place % 4096 < PAGE_BYTES
        assert (Status.MISS in statuses) == matters
        assert tier.contains(keys(1), 1) == [not matters]
        if matters:
            assert sum(rig.counters.totals().values()) == 1
            store(tier, key(1))
            assert rig.is_whole(tier, key(1))
        assert rig.used() == (1 + matters) * FORM.file_bytes


def test_a_layer_that_went_bad_is_set_aside_counted_and_told_once(
    rig: DiskRig, caplog: pytest.LogCaptureFixture
) -> None:
    tier = rig.open()
    store(tier, *keys(1, 2))
    with rig.path(key(1)).open("r+b") as file:
        file.seek(FORM.offset(2))
        file.write(b"x")
    asked = [*layer_keys(key(1), [2, 1]), *layer_keys(key(2), [2])]
    assert load(tier, asked)[::2] == [Status.MISS, Status.OK]
    assert rig.counters.totals() == {"disk_corrupt": 1}
    assert [message for message in caplog.messages if "set aside" in message] == [
        f"tier disk: {rig.path(key(1))} is set aside as {key(1).to_string()}.bad: "
        "layer 2 does not have the checksum it should"
    ]
    assert rig.names() == [f"{key(1).to_string()}.bad", f"{key(2).to_string()}.kv"]


def test_neighbouring_layers_are_read_by_one_call_on_the_thread_that_asks(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = rig.open()
    store(tier, *keys(1, 2))
    read: list[tuple[str, int]] = []
    read_pages = reader.read_pages

    def counted(file: int, pages: Any, offset: int) -> None:
        read.append((threading.current_thread().name, len(pages)))
        read_pages(file, pages, offset)

    monkeypatch.setattr(reader, "read_pages", counted)
    assert load(tier, layer_keys(key(1), ALL_LAYERS)) == [Status.OK] * NUM_LAYERS
    assert read == [(threading.current_thread().name, NUM_LAYERS)]
    read.clear()
    both = [*layer_keys(key(1), [1, 2]), *layer_keys(key(2), ALL_LAYERS), *layer_keys(key(2), [0])]
    assert load(tier, both) == [Status.OK] * len(both)
    assert sorted(number for _, number in read) == [1, 2, NUM_LAYERS]


@pytest.mark.parametrize("bad", ALL_LAYERS)
def test_of_layers_read_by_one_call_those_before_a_bad_one_are_good(rig: DiskRig, bad: int) -> None:
    tier = rig.open()
    store(tier, key(1))
    with rig.path(key(1)).open("r+b") as file:
        file.seek(FORM.offset(bad))
        file.write(b"x")
    found = load(tier, layer_keys(key(1), ALL_LAYERS))
    assert found == [Status.OK] * bad + [Status.MISS] * (NUM_LAYERS - bad)
    assert rig.counters.totals() == {"disk_corrupt": 1}
    assert load(tier, layer_keys(key(2), ALL_LAYERS)) == [Status.MISS] * NUM_LAYERS


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, FORM.file_bytes - 4096, FORM.file_bytes - 1])
@pytest.mark.parametrize("looked_up", [True, False])
def test_a_file_that_was_cut_off_is_set_aside(rig: DiskRig, size: int, looked_up: bool) -> None:
    store(rig.open(), key(1))
    os.truncate(rig.path(key(1)), size)
    tier = rig.open()
    if looked_up:
        assert tier.contains(keys(1), 1) == [False]
    else:
        assert load(tier, layer_keys(key(1), [NUM_LAYERS - 1])) == [Status.MISS]
    assert rig.names() == [f"{key(1).to_string()}.bad"]
    assert rig.used() == size
    store(tier, key(1))
    assert rig.is_whole(tier, key(1))


def _a_folder(path: Path) -> None:
    path.mkdir()


def _a_pipe(path: Path) -> None:
    os.mkfifo(path)


def _a_link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def _text(path: Path) -> None:
    path.write_bytes(b"not a chunk at all".ljust(FORM.file_bytes, b"."))


def _pickle(path: Path) -> None:
    path.write_bytes(b"\x80\x04cos\nsystem\n".ljust(FORM.file_bytes, b"\0"))


@pytest.mark.parametrize("looked_up", [True, False])
@pytest.mark.parametrize("make", [_a_folder, _a_pipe, _a_link, _text, _pickle])
def test_something_else_under_the_name_of_a_chunk_is_a_miss(
    rig: DiskRig, make: Callable[[Path], None], looked_up: bool
) -> None:
    make(rig.path(key(1)))
    tier = rig.open()
    if looked_up:
        tier.contains(keys(1), 1)
    assert load(tier, layer_keys(key(1), [1])) == [Status.MISS]
    assert tier.contains(keys(1), 1) == [False]
    assert rig.counters.totals() == {"disk_foreign": 1}
    store(tier, key(1))
    assert rig.is_whole(tier, key(1))


def test_folders_under_the_name_of_a_chunk_are_set_aside_one_by_one(rig: DiskRig) -> None:
    tier = rig.open()
    for _ in range(2):
        rig.path(key(1)).mkdir()
        (rig.path(key(1)) / "file").touch()
        assert tier.contains(keys(1), 1) == [False]
        assert not rig.path(key(1)).exists()
    store(tier, key(1))
    assert rig.is_whole(tier, key(1))
    assert len(list(rig.folder.glob("*/file"))) == 2


def test_a_buffered_read_that_is_interrupted_anywhere_goes_on(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "reads_directly", lambda folder: False)
    tier = rig.open()
    store(tier, key(1))
    preadv = os.preadv

    def interrupted(file: int, buffers: Any, offset: int) -> int:
        return preadv(file, [memoryview(buffers[0])[:3]], offset)

    with monkeypatch.context() as slow:
        slow.setattr(os, "preadv", interrupted)
        assert load(tier, layer_keys(key(1), ALL_LAYERS)) == [Status.OK] * NUM_LAYERS
    assert rig.counters.totals() == {}


def test_the_file_of_another_chunk_is_not_taken_for_this_one(rig: DiskRig) -> None:
    tier = rig.open()
    store(tier, key(1))
    shutil.copy(rig.path(key(1)), rig.path(key(2)))
    assert load(tier, layer_keys(key(2), [1])) == [Status.MISS]
    assert rig.counters.totals() == {"disk_foreign": 1}


@pytest.mark.parametrize("how", ["version", "layers", "page format"])
def test_a_chunk_that_another_version_wrote_is_a_miss_and_stays(rig: DiskRig, how: str) -> None:
    tier = rig.open()
    store(tier, key(1))
    theirs = in_another_form(key(1), how)
    rig.path(key(1)).write_bytes(theirs)
    tier = rig.open()
    assert load(tier, layer_keys(key(1), [1])) == [Status.MISS]
    assert tier.contains(keys(1), 1) == [False], "nobody promises it from now on"
    assert put(tier, key(1), ALL_LAYERS) == [Status.ERROR] * NUM_LAYERS, "it is not kept"
    assert rig.path(key(1)).read_bytes() == theirs
    assert rig.counters.totals().keys() == {"disk_other_form"}


def test_a_chunk_that_takes_the_place_of_another_versions_is_found(rig: DiskRig) -> None:
    rig.path(key(1)).write_bytes(in_another_form(key(1), "version"))
    tier = rig.open()
    assert load(tier, layer_keys(key(1), [1])) == [Status.MISS]
    rig.path(key(1)).unlink()
    assert tier.contains(keys(1), 1) == [False]
    store(rig.open(), key(1))
    assert tier.contains(keys(1), 1) == [True]
    assert rig.is_whole(tier, key(1))


def _refuse(path: str, *_: object) -> Any:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


def test_a_file_that_may_not_be_read_is_a_miss_alone(rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = rig.open()
    store(tier, *keys(1, 2))
    with monkeypatch.context() as refused:
        refused.setattr(reader, "open_to_read", _refuse)
        assert load(tier, layer_keys(key(1), [1])) == [Status.MISS]
    assert rig.counters.totals() == {"disk_unreadable": 1}
    assert tier.contains(keys(1, 2), 1) == [False, True]
    assert rig.is_whole(tier, key(2))


def test_what_is_put_under_the_name_of_a_file_that_may_not_be_read_is_not_kept(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = rig.open()
    store(tier, key(1))
    with monkeypatch.context() as refused:
        refused.setattr(reader, "open_to_read", _refuse)
        assert put(tier, key(1), ALL_LAYERS) == [Status.ERROR] * NUM_LAYERS
        assert tier.contains(keys(1), 1) == [False]


def test_a_bad_file_for_which_there_is_no_other_name_is_removed(rig: DiskRig) -> None:
    tier = rig.open()
    store(tier, key(1))
    (rig.folder / f"{key(1).to_string()}.bad").mkdir()
    _text(rig.path(key(1)))
    for _ in range(2):
        assert load(tier, layer_keys(key(1), [1])) == [Status.MISS]
    assert rig.counters.totals() == {"disk_foreign": 1}
    assert not rig.path(key(1)).exists()
    store(tier, key(1))
    assert rig.is_whole(tier, key(1))
    assert rig.used() == FORM.file_bytes


def test_a_file_that_may_not_be_set_aside_is_promised_no_more(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    _text(rig.path(key(1)))
    tier = rig.open()
    monkeypatch.setattr(os, "rename", _refuse)
    assert load(tier, layer_keys(key(1), [1])) == [Status.MISS]
    assert tier.contains(keys(1), 1) == [False]


def test_a_file_that_may_not_be_removed_stays_and_another_one_goes(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, unlink = rig.open(room=2), os.unlink
    store(tier, *keys(1, 2))
    monkeypatch.setattr(os, "unlink", lambda path: (_refuse if key(1).to_string() in path else unlink)(path))
    store(tier, key(3))
    assert tier.contains(keys(1, 2, 3), 1) == [True, False, True]


def test_the_draft_of_another_user_is_left_alone(rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = rig.folder / names.draft_name(key(1).to_string())
    draft.write_bytes(bytes(4096))
    os_open = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *more: (_refuse if path == str(draft) else os_open)(path, *more)
    )
    rig.open()
    assert rig.names() == [draft.name]


def test_a_file_that_was_removed_and_written_anew_meanwhile_is_read(rig: DiskRig) -> None:
    tier, other = rig.open(), rig.open()
    store(tier, key(1))
    assert load(tier, layer_keys(key(1), [1])) == [Status.OK]
    rig.path(key(1)).unlink()
    asked = layer_keys(key(1), ALL_LAYERS)
    pages = [torch.full((PAGE_BYTES,), 7 + layer, dtype=torch.uint8) for layer in ALL_LAYERS]
    assert other.put(asked, pages, 1) == [Status.OK] * NUM_LAYERS
    got = [page.clone().zero_() for page in pages]
    assert tier.get(asked, got, 1) == [Status.OK] * NUM_LAYERS
    assert all(a.equal(b) for a, b in zip(got, pages, strict=True))


def test_what_is_not_lwkvs_is_left_alone_and_not_counted(rig: DiskRig) -> None:
    others = ["notes.txt", "x.tmp", "model.kv", "a.bad", f"{key(1).to_string()}.tmp"]
    for name in others:
        (rig.folder / name).write_bytes(bytes(9 * FORM.file_bytes))
    tier = rig.open(room=1)
    store(tier, *keys(1, 2))
    assert tier.gauges() == {"files": 1, "used_bytes": FORM.file_bytes}
    assert set(others) <= set(os.listdir(rig.folder))


def test_a_sector_that_cannot_be_read_fails_its_page_alone(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = rig.open()
    store(tier, *keys(1, 2))
    read_pages = reader.read_pages

    def fail_first(file: int, pages: object, offset: int) -> None:
        monkeypatch.setattr(reader, "read_pages", read_pages)
        raise OSError(errno.EIO, "bad sector")

    monkeypatch.setattr(reader, "read_pages", fail_first)
    monkeypatch.setattr(disk_tier, "NUM_THREADS", 1)
    asked = [*layer_keys(key(1), [1]), *layer_keys(key(2), [1])]
    assert load(tier, asked) == [Status.ERROR, Status.OK]
    assert rig.counters.totals() == {"disk_io_errors": 1}


# room


def test_the_chunks_used_longest_ago_go_first(rig: DiskRig) -> None:
    tier = rig.open(room=3)
    store(tier, *keys(1, 2, 3))
    assert rig.is_whole(tier, key(1))
    tier.follow(keys(1), 1)
    store(tier, key(4))
    assert tier.contains(keys(1, 2, 3, 4), 1) == [True, False, True, True]
    assert rig.used() == 3 * FORM.file_bytes
    assert rig.counters.totals() == {"disk_evicted": 1}


def test_deep_chunks_go_before_those_that_they_need(rig: DiskRig) -> None:
    tier = rig.open(room=3)
    store(tier, *keys(3, 2, 1))
    tier.follow(keys(1, 2, 3), 1)
    store(tier, key(4))
    assert tier.contains(keys(1, 2, 3), 1) == [True, True, False]


def test_the_order_of_use_survives_a_restart(rig: DiskRig) -> None:
    store(rig.open(room=3), *keys(1, 2, 3))
    for age, number in enumerate((2, 3, 1)):
        os.utime(rig.path(key(number)), (age, age))
    tier = rig.open(room=3)
    store(tier, *keys(4, 5))
    assert tier.contains(keys(1, 2, 3), 1) == [True, False, False]


def test_what_was_set_aside_goes_first(rig: DiskRig) -> None:
    tier = rig.open(room=2)
    store(tier, *keys(1, 2))
    rig.path(key(2)).write_bytes(bytes(FORM.file_bytes))
    assert load(tier, layer_keys(key(2), [1])) == [Status.MISS]
    store(tier, key(3))
    assert rig.names() == [f"{chunk.to_string()}.kv" for chunk in keys(1, 3)]


def test_a_folder_that_has_too_much_is_cut_down_at_the_start(rig: DiskRig) -> None:
    store(rig.open(), *keys(1, 2, 3, 4))
    rig.open(room=2)
    assert rig.used() == 2 * FORM.file_bytes


def test_what_another_process_uses_is_kept(rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lru, "TOUCH_S", -1.0)
    mine, other = rig.open(room=2), rig.open(room=2)
    store(mine, *keys(1, 2))
    clock = other._folder._clock
    monkeypatch.setattr(other._folder, "_clock", lambda: clock() + 60)
    other.follow(keys(1), 1)
    store(mine, key(3))
    assert mine.contains(keys(1, 2, 3), 1) == [True, False, True]


def test_chunks_of_other_processes_make_room_too(rig: DiskRig) -> None:
    early = rig.open(room=2)
    store(rig.open(room=2), *keys(1, 2))
    store(early, *keys(3, 4))
    assert early.contains(keys(1, 2, 3, 4), 1) == [False, False, True, True]
    assert rig.used() == 2 * FORM.file_bytes


def test_room_is_counted_anew_when_the_count_is_wrong(rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = rig.open(room=2)
    store(tier, *keys(1, 2))
    rig.path(key(1)).unlink()
    monkeypatch.setattr(folder, "RESCAN_S", -1.0)
    store(tier, key(3))
    assert tier.contains(keys(2, 3), 1) == [True, True]
    assert rig.used() == 2 * FORM.file_bytes


def test_when_nothing_can_go_nothing_is_written_and_what_is_there_is_read(rig: DiskRig) -> None:
    tier, busy = rig.open(room=1), rig.open(room=1)
    put(busy, key(1), range(1, NUM_LAYERS))
    with pytest.raises(OSError, match="max_local_disk_size") as full:
        put(tier, key(2), range(1, NUM_LAYERS))
    assert full.value.errno == errno.ENOSPC
    put(busy, key(1), [0])
    assert rig.is_whole(tier, key(1))
    assert rig.used() == FORM.file_bytes


WHAT = st.sampled_from(["store", "begin", "remove", "read"])


@given(steps=st.lists(st.tuples(st.integers(0, 1), WHAT, st.integers(1, 6)), max_size=25))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_processes_keep_the_limit_together_whatever_they_do(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, str, int]]
) -> None:
    with opened(tmp_path_factory.mktemp("shared"), room=3) as rig:
        # What is begun and never ended is waited for; not for long here.
        tiers = [rig.open(load_timeout_s=0.1), rig.open(load_timeout_s=0.1)]
        for who, what, number in steps:
            tier, chunk = tiers[who], key(number)
            with suppress(OSError):  # no space: what was begun cannot go
                if what == "store":
                    store(tier, chunk)
                elif what == "begin":
                    put(tier, chunk, range(1, NUM_LAYERS))
                elif what == "remove":
                    rig.path(chunk).unlink(missing_ok=True)
                else:
                    assert rig.is_whole(tier, chunk) in (True, False)
            assert sum((rig.folder / name).stat().st_size for name in rig.names()) <= 3 * FORM.file_bytes
        rig.close()
        rig.open()
        assert rig.used() <= 3 * FORM.file_bytes


# a disk that is full, or gone


def fail_fallocate(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Have the file system say so often that it is full."""
    left = [times]
    allocate = os.posix_fallocate

    def full(file: int, offset: int, size: int) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(file, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)


def test_a_disk_that_is_full_makes_room_once(rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = rig.open()
    store(tier, *keys(1, 2))
    fail_fallocate(monkeypatch, 1)
    store(tier, key(3))
    assert tier.contains(keys(1, 2, 3), 1) == [False, True, True]
    assert rig.counters.totals() == {"disk_no_space": 1, "disk_evicted": 1}
    assert rig.used() == 2 * FORM.file_bytes


def test_a_disk_that_stays_full_fails_the_call_and_keeps_nothing_of_it(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = rig.open()
    store(tier, *keys(1, 2, 3))
    with monkeypatch.context() as full:
        fail_fallocate(full, 99)
        with pytest.raises(OSError, match="No space left"):
            put(tier, key(4), range(1, NUM_LAYERS))
    assert rig.is_whole(tier, key(3))
    assert rig.used() == 2 * FORM.file_bytes
    store(tier, key(4))
    assert rig.is_whole(tier, key(4))


def full_after_all(*_: object) -> None:
    raise OSError(errno.ENOSPC, "full after all")


@pytest.mark.parametrize("call", ["write_pages", "write_bytes"])
def test_a_write_that_breaks_off_leaves_nothing(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    tier = rig.open()
    with monkeypatch.context() as broken:
        broken.setattr(writer, call, full_after_all)
        with pytest.raises(OSError, match="full after all"):
            store(tier, key(1))
    assert (rig.names(), rig.used(), tier.contains(keys(1), 1)) == ([], 0, [False])
    store(tier, key(1))
    assert rig.is_whole(tier, key(1))


def test_a_disk_that_fills_up_while_a_file_is_written_makes_room_for_the_next(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = rig.open()
    store(tier, *keys(1, 2))
    with monkeypatch.context() as full:
        full.setattr(writer, "write_pages", full_after_all)
        with pytest.raises(OSError, match="full after all"):
            store(tier, key(3))
    assert tier.contains(keys(1, 2), 1) == [False, True]
    assert rig.counters.totals() == {"disk_no_space": 1, "disk_evicted": 1}
    store(tier, key(3))
    assert rig.is_whole(tier, key(3))


@pytest.mark.parametrize("name", ["pwrite", "open"])
def test_a_disk_that_is_full_at_the_start_is_read_from(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    store(rig.open(), key(1))
    call = getattr(os, name)

    def full(what: object, flags: Any, *more: Any) -> Any:
        if name == "pwrite" or flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return call(what, flags, *more)

    monkeypatch.setattr(os, name, full)
    tier = rig.open()
    assert tier.contains(keys(1), 1) == [True]
    assert rig.is_whole(tier, key(1))


@pytest.mark.parametrize("number", [errno.EFAULT, errno.EINVAL])
def test_memory_that_o_direct_does_not_take_goes_through_the_page_cache(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    tier, is_direct = rig.open(), io.reads_directly(str(rig.folder))
    io._tell_of_refusal.cache_clear()
    for name in ("preadv", "pwritev"):
        call = getattr(os, name)

        def refuse(file: int, *arguments: Any, call: Any = call) -> int:
            if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(number, os.strerror(number))
            return int(call(file, *arguments))

        monkeypatch.setattr(os, name, refuse)
    store(tier, *keys(1, 2))
    assert rig.is_whole(tier, key(2))
    told = [message for message in caplog.messages if "O_DIRECT does not take them" in message]
    assert len(told) == is_direct
    assert all(message.endswith(f"[Errno {number}] {os.strerror(number)}") for message in told)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_that_takes_no_space_ahead_is_used_without(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def not_offered(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", not_offered)
    tier = rig.open()
    store(tier, key(1))
    assert rig.is_whole(tier, key(1))


def test_a_file_system_without_o_direct_is_used_buffered(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(disk_tier, "reads_directly", lambda folder: False)
    store(rig.open(), key(1))
    assert rig.is_whole(rig.open(), key(1))
    assert "buffered: this file system refuses O_DIRECT" in caplog.text


def test_a_folder_that_vanishes_is_missing_and_comes_back(rig: DiskRig) -> None:
    tier = rig.open()
    store(tier, key(1))
    shutil.rmtree(rig.folder)
    assert tier.contains(keys(1), 1) == [False]
    assert load(tier, layer_keys(key(1), [1])) == [Status.MISS]
    with pytest.raises(FileNotFoundError):
        store(tier, key(2))
    rig.folder.mkdir()
    store(tier, key(2))
    assert rig.is_whole(tier, key(2))


def test_a_process_that_stands_still_with_the_lock_stops_no_reader(rig: DiskRig) -> None:
    tier = rig.open(load_timeout_s=0.01)
    store(rig.open(), key(1))
    with locked(str(rig.folder), 1):
        assert tier.contains(keys(1), 1) == [True]
        assert rig.is_whole(tier, key(1))
        assert tier.gauges()["used_bytes"] == FORM.file_bytes
        with pytest.raises(TimeoutError, match="another process has held"):
            put(tier, key(2), [1])
    store(rig.open(), key(2))


def test_a_lock_that_is_held_at_the_start_is_no_reason_not_to_start(rig: DiskRig) -> None:
    store(rig.open(), key(1))
    with locked(str(rig.folder), 1):
        tier = rig.open(load_timeout_s=0.01)
        assert rig.is_whole(tier, key(1))
    store(rig.open(), key(2))
    assert rig.used() == 2 * FORM.file_bytes


def test_a_child_that_is_forked_while_the_lock_is_held_does_not_keep_it(rig: DiskRig) -> None:
    path = str(rig.folder)
    with locked(path, 1) as lock:
        inherited = os.dup(lock._file)  # what a child has of it
    with locked(path, 0):
        os.close(inherited)


# wrong from the start


def test_a_folder_that_is_missing_is_made_if_its_parent_is_there(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as rig:
        rig.open()
        rig.open()
    assert (tmp_path / "cache").is_dir()
    told = r"none' is not there, and only the last folder .* is made"
    with opened(tmp_path / "none" / "cache") as rig, pytest.raises(ConfigError, match=told):
        rig.open()
    assert not (tmp_path / "none").exists()


def test_the_doctor_makes_no_folder(tmp_path: Path) -> None:
    config = Config(local_disk=str(tmp_path / "cache"), max_local_disk_size=1)
    assert "is made when an engine starts" in disk_tier.examine(f"file://{tmp_path}/cache", config)["files"]
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_is_a_file_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    told = r"local_disk: '.*cache' cannot be used: .*give a folder"
    with opened(tmp_path / "cache") as rig, pytest.raises(ConfigError, match=told) as refused:
        rig.open()
    assert isinstance(refused.value, ValueError)


def test_a_folder_that_cannot_be_written_to_is_refused_at_the_start(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: str, direct: bool) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("lwkv.storage.disk.io.create", read_only)
    with pytest.raises(ConfigError, match="Read-only file system"):
        rig.open()


def test_a_limit_below_one_chunk_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_local_disk_size holds 1024 bytes, but one chunk needs 16384"):
        open_only(
            make_setup(PAGE_BYTES, NUM_LAYERS), local_disk=str(tmp_path), max_local_disk_size=1024 / 2**30
        )
