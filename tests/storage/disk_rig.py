"""A folder of chunk files, and disk tiers on it, each as another process would open one."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from storage.places import make_setup, open_only
from storage.rig import NUM_LAYERS, PAGE_BYTES
from storage.tier_calls import layer_keys, load

from lwkv.keys import ChunkKey
from lwkv.storage import Status
from lwkv.storage.disk.format import FileForm, pack
from lwkv.storage.disk.io import bytes_taken
from lwkv.storage.disk.lock import used_in
from lwkv.storage.disk.tier import DiskTier
from lwkv.telemetry.counters import Counters

FORM = FileForm(NUM_LAYERS, PAGE_BYTES, "canonical")
_GIB = 1 << 30


class DiskRig:
    """`open` makes a tier with room for `room` chunks; `counters` has what all of them count."""

    def __init__(self, folder: Path, room: int = 8) -> None:
        self.folder = folder
        self.room = room
        self.counters = Counters()
        self._tiers: list[DiskTier] = []

    def open(self, room: int | None = None, **settings: object) -> DiskTier:
        tier = open_disk(self.folder, room or self.room, self.counters, **settings)
        self._tiers.append(tier)
        return tier

    def path(self, chunk: ChunkKey) -> Path:
        return self.folder / f"{chunk.to_string()}.kv"

    def names(self) -> list[str]:
        """The files that lwkv made, but for its lock."""
        return sorted(name for name in os.listdir(self.folder) if not name.startswith("."))

    def used(self) -> int:
        """What is taken by files; what is counted must be the same."""
        used = sum(bytes_taken((self.folder / name).lstat()) for name in self.names())
        assert used_in(str(self.folder)) == used
        return used

    def is_whole(self, tier: DiskTier, chunk: ChunkKey) -> bool:
        statuses = load(tier, layer_keys(chunk, range(NUM_LAYERS)))
        assert statuses in ([Status.OK] * NUM_LAYERS, [Status.MISS] * NUM_LAYERS)
        return statuses[0] is Status.OK

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()


def open_disk(folder: Path, room: int, counters: Counters | None = None, **settings: object) -> DiskTier:
    """Open a tier with room for `room` chunks of the tests."""
    setup = replace(make_setup(PAGE_BYTES, NUM_LAYERS), counters=counters or Counters())
    size = (room * FORM.file_bytes + 1) / _GIB
    tier = open_only(setup, local_disk=str(folder), max_local_disk_size=size, **settings)
    assert isinstance(tier, DiskTier)
    return tier


def in_another_form(chunk: ChunkKey, how: str) -> bytes:
    """A whole file of a chunk in another version, with more layers, or in another page format."""
    form = {
        "version": FORM,
        "layers": replace(FORM, num_layers=FORM.num_layers + 1),
        "page format": replace(FORM, page_format="other"),
    }[how]
    header = bytearray(pack(form.header(chunk.to_string(), [0] * form.num_layers), form.header_bytes))
    if how == "version":
        header[8], header[24:28] = 99, bytes(4)
        header[24:28] = zlib.crc32(header).to_bytes(4, "little")
    return bytes(header).ljust(form.file_bytes, b"x")


@contextmanager
def opened(folder: Path, room: int = 8) -> Iterator[DiskRig]:
    rig = DiskRig(folder, room)
    try:
        yield rig
    finally:
        rig.close()
