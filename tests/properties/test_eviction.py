"""A prompt is evicted from its end, in every tier, however it was stored: what can be found is found."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage.disk_rig import FORM
from storage.faulty_tier import LONG_S
from storage.prefix_oracle import Event, Oracle, a_tree, events
from storage.rig import Rig, keys

from lwkv.storage.disk.folder import Folder
from lwkv.storage.disk.lru import TOUCH_S
from lwkv.storage.disk.tier import DiskTier
from lwkv.telemetry.counters import Counters

ROOM = 16
PROMPT = list(range(1000, 1024))
FOREIGN = 7


def store_in_steps(rig: Rig, prompt: Sequence[int], step: int) -> None:
    """Store a prompt as it is computed, `step` chunks at a time."""
    for end in range(step, len(prompt) + step, step):
        write = rig.begin(*prompt[:end])
        if write is not None:
            write.commit()


def happen(rig: Rig, event: Event) -> None:
    if event.step:
        store_in_steps(rig, event.prompt, event.step)
        return
    hold = rig.hold(*event.prompt)
    rig.load(hold)
    hold.release()


@given(st.lists(events(), max_size=25), st.integers(1, 20))
@settings(max_examples=150, deadline=None)
def test_host_memory_finds_of_every_prompt_what_an_oracle_of_the_same_room_finds(
    history: list[Event], room: int
) -> None:
    rig, oracle = Rig(room), Oracle(room)
    for event in history:
        happen(rig, event)
        oracle.use(event.prompt) if event.step else oracle.load(event.prompt)
        for prompt in a_tree():
            assert rig.lookup(*prompt) >= oracle.find(prompt), (event, prompt)
        assert not rig.host._order._orphans
    rig.end()


@pytest.mark.parametrize("step", [24, 12, 8, 5, 4, 2, 1])
def test_of_a_prompt_larger_than_host_memory_as_much_is_found_as_fits_whatever_the_steps(step: int) -> None:
    rig = Rig(ROOM)
    store_in_steps(rig, PROMPT, step)
    assert rig.lookup(*PROMPT) == ROOM
    store_in_steps(rig, PROMPT, step)
    assert rig.lookup(*PROMPT) == ROOM
    rig.end()


@pytest.mark.parametrize("step", [16, 5, 2, 1])
def test_a_prompt_that_grew_loses_its_end_to_a_foreign_chunk(step: int) -> None:
    rig = Rig(ROOM)
    store_in_steps(rig, PROMPT[:ROOM], step)
    rig.store(FOREIGN)
    assert rig.lookup(*PROMPT[:ROOM]) == ROOM - 1
    assert rig.lookup(FOREIGN) == 1
    rig.end()


def test_the_chunks_before_those_that_are_stored_stay_until_the_store_ends() -> None:
    rig = Rig(8)
    rig.store(1, 2, 3)
    write = rig.begin(1, 2, 3, 4, 5)
    assert write is not None
    assert rig.host.pins == 3
    other = rig.begin(*range(10, 18))
    assert other is not None
    assert len(other.keys) == 3, "what is free"
    other.commit()
    write.commit()
    assert rig.host.pins == 0
    assert rig.lookup(1, 2, 3, 4, 5) == 5
    rig.end()


def test_two_prompts_that_are_stored_at_once_keep_what_both_begin_with() -> None:
    rig = Rig(8)
    prompts = [[1, 2, 3, 4], [1, 2, 5, 6]]
    parents = [None, *keys(1, 2, 3), None, *keys(1, 2, 5)]
    write = rig.manager.begin_write(keys(1, 2, 3, 4, 1, 2, 5, 6), parents)
    assert write is not None
    assert write.positions.tolist() == [0, 1, 2, 3, 6, 7]
    write.commit()
    for number, left in ((20, (4, 4)), (21, (4, 4)), (22, (4, 3)), (23, (4, 2)), (24, (3, 2)), (25, (2, 2))):
        rig.store(number)
        assert tuple(rig.lookup(*prompt) for prompt in prompts) == left
    rig.end()


def test_a_chunk_whose_parent_went_is_the_next_to_go() -> None:
    rig = Rig(8)
    rig.store(1, 2, 3, 4)
    rig.store(5, 6, 7, 8)
    rig.forget(5)
    assert rig.lookup(5, 6, 7, 8) == 0
    for number in (11, 12, 13, 14):  # the first of them finds a free place
        rig.store(number)
        assert rig.lookup(1, 2, 3, 4) == 4
    rig.store(15)
    assert rig.lookup(1, 2, 3, 4) == 3
    rig.end()


def test_a_chunk_is_kept_in_its_turn_when_its_parent_is_stored_anew() -> None:
    rig = Rig(6)
    rig.store(5, 6, 7)
    rig.forget(5)
    rig.store(1, 2)
    rig.store(5, 6, 7)
    rig.store(8)
    rig.store(9)
    assert rig.lookup(1, 2) == 1
    assert rig.lookup(5, 6, 7) == 3
    rig.end()


class Disk:
    """A disk tier, and host memory that keeps nothing; `restart` is another process on the same folder."""

    def __init__(self, folder: Path, room: int) -> None:
        self._folder = folder
        self._room = room
        self.now = 1e9
        self._open()

    def _open(self) -> None:
        counters = Counters()
        size = self._room * FORM.file_bytes
        folder = Folder(str(self._folder), size, False, counters, lambda: self.now)
        tier: Any = DiskTier(folder, FORM, counters)
        self.rig = Rig(400, [tier], keep_in_host=False)

    def restart(self) -> None:
        self.close()
        self._open()

    def close(self) -> None:
        self.rig.manager.close(LONG_S)

    def find(self, prompt: Sequence[int]) -> int:
        """How many leading chunks have files."""
        names = set(os.listdir(self._folder))
        missing = (i for i, chunk in enumerate(keys(*prompt)) if f"{chunk.to_string()}.kv" not in names)
        return next(missing, len(prompt))

    def num_files(self) -> int:
        return sum(name.endswith(".kv") for name in os.listdir(self._folder))


@given(
    st.lists(st.tuples(events(), st.booleans()), max_size=10),
    st.integers(1, 20),
    st.sampled_from([0.0, TOUCH_S + 1]),
)
@settings(max_examples=40, deadline=None)
def test_a_disk_finds_of_every_prompt_what_an_oracle_of_the_same_room_finds(
    history: list[tuple[Event, bool]], room: int, pause_s: float
) -> None:
    with TemporaryDirectory() as folder:
        disk, oracle = Disk(Path(folder), room), Oracle(room)
        for event, restarts in history:
            disk.now += pause_s
            if restarts:
                disk.restart()
            happen(disk.rig, event)
            disk.rig.settle()
            oracle.use(event.prompt) if event.step else oracle.load(event.prompt)
            kept = {chunk for prompt in a_tree() for chunk in prompt[: disk.find(prompt)]}
            assert len(kept) == disk.num_files(), "no file is dead weight"
            if pause_s > TOUCH_S:  # else what was used in the last seconds is one to a process that starts
                for prompt in a_tree():
                    assert disk.find(prompt) >= oracle.find(prompt), (event, prompt)
        disk.close()


@pytest.mark.parametrize("step", [24, 12, 8, 5, 2, 1])
def test_of_a_prompt_larger_than_a_disk_as_much_is_found_as_fits_after_a_restart(
    step: int, tmp_path: Path
) -> None:
    disk = Disk(tmp_path, ROOM)
    store_in_steps(disk.rig, PROMPT, step)
    disk.rig.settle()
    assert (disk.find(PROMPT), disk.num_files()) == (ROOM, ROOM)
    disk.restart()
    assert disk.rig.lookup(*PROMPT) == ROOM
    happen(disk.rig, Event(tuple(PROMPT), 0))
    disk.rig.store(FOREIGN)
    disk.restart()
    assert (disk.rig.lookup(*PROMPT), disk.rig.lookup(FOREIGN)) == (ROOM - 1, 1)
    disk.close()
