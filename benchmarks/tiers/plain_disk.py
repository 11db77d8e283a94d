"""What threads reach that read and write files directly, with nothing else to do."""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lwkv.storage.disk.io import OWNER_ONLY

NUM_THREADS = 4


class PlainDisk:
    """Files of `file_bytes`, written whole and read in pieces of `piece_bytes`, piece by piece of all files.

    Sizes are multiples of 4096. `direct` opens them with O_DIRECT.
    """

    def __init__(self, folder: Path, num_files: int, file_bytes: int, piece_bytes: int, direct: bool) -> None:
        self._folder, self._num_files = folder, num_files
        self._file_bytes, self._piece_bytes = file_bytes, piece_bytes
        self._flags = os.O_DIRECT if direct else 0
        self._memory = [mmap.mmap(-1, file_bytes) for _ in range(num_files)]
        for memory in self._memory:
            memory[:] = os.urandom(file_bytes)
        self._rounds = itertools.count()
        self._round = -1

    def remove_old(self) -> None:
        """Remove all files but those written last."""
        for path in self._folder.glob("plain-*"):
            if not path.name.startswith(f"plain-{self._round}-"):
                path.unlink()

    def write(self) -> None:
        """Write all files, new ones each time."""
        self._round = next(self._rounds)
        self._in_threads(self._write_one, [(number,) for number in range(self._num_files)])

    def read(self) -> None:
        """Read all that was written last."""
        offsets = range(0, self._file_bytes, self._piece_bytes)
        self._in_threads(
            self._read_one, [(number, offset) for offset in offsets for number in range(self._num_files)]
        )

    def _in_threads(self, work: Callable[..., None], jobs: list[tuple[int, ...]]) -> None:
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            for _ in threads.map(lambda job: work(*job), jobs):
                pass

    def _write_one(self, number: int) -> None:
        file = os.open(self._path(number), os.O_WRONLY | os.O_CREAT | self._flags, OWNER_ONLY)
        try:
            os.posix_fallocate(file, 0, self._file_bytes)
            _require(os.pwrite(file, self._memory[number], 0), self._file_bytes)
        finally:
            os.close(file)

    def _read_one(self, number: int, offset: int) -> None:
        piece = memoryview(self._memory[number])[offset : offset + self._piece_bytes]
        file = os.open(self._path(number), os.O_RDONLY | self._flags)
        try:
            _require(os.preadv(file, [piece], offset), len(piece))
        finally:
            os.close(file)

    def _path(self, number: int) -> Path:
        return self._folder / f"plain-{self._round}-{number}"


def _require(done: int, wanted: int) -> None:
    if done != wanted:
        raise OSError(f"{done} of {wanted} bytes were moved: the disk is full, or files are limited")
