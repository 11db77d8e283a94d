"""Writers in processes of their own: run by test_disk_crashes.py, since threads forbid to fork.

After what happens to the writers another process opens the folder. It must find nothing but whole chunks, and
no byte that is not theirs.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from storage.disk_rig import FORM, open_disk, opened
from storage.rig import key
from storage.tier_calls import store

from lwkv.keys import ChunkKey

ROOM = 6


def write_on(folder: Path, begun: int) -> None:
    """Store chunks for ever: new ones, known ones, more than there is room for."""
    tier, random_number = open_disk(folder, ROOM), random.Random(os.getpid())
    os.write(begun, b".")
    while True:
        store(tier, key(random_number.randrange(12)))


def check(folder: Path) -> None:
    """Open the folder as after a restart: all that is visible is whole, all that is there is counted."""
    with opened(folder, ROOM) as rig:
        tier, names = rig.open(), rig.names()
        assert all(name.endswith(".kv") for name in names), names
        stems = [name.removesuffix(".kv").rpartition(".") for name in names]
        assert all(rig.is_whole(tier, ChunkKey(space, bytes.fromhex(digits))) for space, _, digits in stems)
        assert rig.used() == len(names) * FORM.file_bytes <= ROOM * FORM.file_bytes
        assert rig.counters.totals().keys() <= {"disk_leftovers"}, rig.counters.totals()
        print(rig.counters.totals().get("disk_leftovers", 0), len(names), flush=True)


def fork(work: Callable[[], object]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)


def end_of(child: int) -> None:
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit("what went wrong is above")


def kill_writers(folder: Path, rounds: int, writers: int) -> None:
    """Kill writers at random moments after they have begun."""
    moments = random.Random(7)
    for _ in range(rounds):
        begun, begin = os.pipe()
        children = [fork(partial(write_on, folder, begin)) for _ in range(writers)]
        for _ in children:
            os.read(begun, 1)
        time.sleep(moments.random() * 0.02)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(begun)
        os.close(begin)
        end_of(fork(lambda: check(folder)))


def write_together(folder: Path, rounds: int, writers: int) -> None:
    """Have several processes write the same chunks, each all of them."""

    def write_all() -> None:
        tier = open_disk(folder, ROOM * writers)  # what is being written takes room too
        for number in range(ROOM):
            store(tier, key(number))
        tier.close()

    for _ in range(rounds):
        for child in [fork(write_all) for _ in range(writers)]:
            end_of(child)
        end_of(fork(lambda: check(folder)))
        for path in folder.glob("*.kv"):
            path.unlink()


def write_too_much(folder: Path, rounds: int, writers: int) -> None:
    """Have the system refuse files of the size that a chunk has."""

    def write_one() -> None:
        tier = open_disk(folder, ROOM)
        for size in (FORM.file_bytes - 1, resource.RLIM_INFINITY):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            with suppress(OSError):
                store(tier, key(int(size > 0)))

    end_of(fork(write_one))
    end_of(fork(lambda: check(folder)))


if __name__ == "__main__":
    works = {"kill": kill_writers, "together": write_together, "limit": write_too_much}
    works[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
