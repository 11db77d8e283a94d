"""Processes that are killed, and processes that write the same chunks."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from python_path import python_path
from storage.disk_rig import FORM, opened
from storage.rig import key
from storage.tier_calls import store

TESTS = Path(__file__).parents[2]


def run_writers(work: str, folder: Path, rounds: int = 1, writers: int = 1) -> list[tuple[int, int]]:
    """What each check found: leftovers that it removed, and whole chunks."""
    environment = {**os.environ, "PYTHONPATH": python_path(TESTS, TESTS.parent), "OMP_NUM_THREADS": "1"}
    script = str(TESTS / "storage" / "disk_crashes.py")
    done = subprocess.run(
        [sys.executable, script, work, str(folder), str(rounds), str(writers)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return [(int(leftovers), int(chunks)) for leftovers, chunks in lines]


@pytest.mark.parametrize(("rounds", "writers"), [pytest.param(100, 1, marks=pytest.mark.slow), (20, 2)])
def test_a_writer_that_is_killed_leaves_whole_chunks_and_no_byte_more(
    tmp_path: Path, rounds: int, writers: int
) -> None:
    found = run_writers("kill", tmp_path, rounds, writers)
    assert len(found) == rounds
    assert sum(leftovers for leftovers, _ in found) > 0, "no writer was killed in the middle of a chunk"
    assert all(chunks > 0 for _, chunks in found[rounds // 2 :])


def test_processes_that_write_the_same_chunks_leave_each_of_them_once(tmp_path: Path) -> None:
    assert run_writers("together", tmp_path, rounds=10, writers=3) == [(0, 6)] * 10


def test_a_system_that_refuses_large_files_loses_their_chunks_only(tmp_path: Path) -> None:
    assert run_writers("limit", tmp_path) == [(0, 1)]


@contextmanager
def mounted(folder: Path, num_bytes: int) -> Iterator[bool]:
    """A file system of this size at `folder`, where this process may mount one; whether it may."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        done = False
    try:
        yield done
    finally:
        if done:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def limit_in_words(folder: Path, num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have files be refused as by a file system of this size."""
    allocate = os.posix_fallocate

    def allocate_if_room(file: int, offset: int, size: int) -> None:
        if sum(path.stat().st_size for path in folder.iterdir()) > num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(file, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", allocate_if_room)


@pytest.mark.parametrize("real", [True, False])
def test_a_file_system_smaller_than_the_limit_is_filled_and_then_made_room_in(
    tmp_path: Path, real: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 5 * FORM.file_bytes
    with mounted(tmp_path, size) if real else nullcontext(False) as is_mounted:
        if not is_mounted:
            limit_in_words(tmp_path, size, monkeypatch)
        with opened(tmp_path, room=50) as rig:
            tier = rig.open()
            for number in range(20):
                store(tier, key(number))
                assert rig.is_whole(tier, key(number))
                assert rig.used() <= size
            there = [rig.is_whole(tier, key(number)) for number in range(20)]
            assert 3 <= sum(there) <= 5
            assert all(there[-3:])
        with opened(tmp_path, room=50) as rig:
            rig.open()
            assert rig.used() == len(rig.names()) * FORM.file_bytes
