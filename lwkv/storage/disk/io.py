"""Reads and writes of pages, straight between the disk and the memory of the pages where that is possible.

O_DIRECT takes memory, sizes and offsets that are multiples of 4096 only. What of a page is not goes through a
small buffer that is.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import torch

from lwkv.storage.disk.format import ALIGNMENT, BadFileError, align
from lwkv.storage.disk.names import probe_name

# A FIFO or a link that somebody put into the folder is not followed and not waited for.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_DIRECT = getattr(os, "O_DIRECT", 0)
_MOST_VECTORS = 512
_Buffer = mmap.mmap | memoryview
_Call = Callable[[int, Sequence[_Buffer], int], int]
log = logging.getLogger(__name__)
OWNER_ONLY = 0o600
_BLOCK_BYTES = 512
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class _Vectors:
    """Aligned memory for pages, in order, and which parts of it stand for which parts of pages."""

    views: list[memoryview]
    stand_ins: list[tuple[memoryview, memoryview]]


def bytes_taken(found: os.stat_result) -> int:
    """What a file takes on the disk: of a file with holes, what is there. 0 for what is no ordinary file."""
    return min(found.st_size, found.st_blocks * _BLOCK_BYTES) if stat.S_ISREG(found.st_mode) else 0


def open_to_read(path: str, direct: bool) -> int:
    """A descriptor; the caller closes it. Raises OSError."""
    return os.open(path, _READ | (_DIRECT if direct else 0))


def create(path: str, direct: bool) -> int:
    """A descriptor of a new file, for its owner only; the caller closes it. Raises OSError."""
    return os.open(path, _CREATE | (_DIRECT if direct else 0), OWNER_ONLY)


def reads_directly(folder: str) -> bool:
    """Whether O_DIRECT works in `folder`: some file systems refuse it, some only when it is used.

    Where it is full, what it takes is taken for granted: each file is tried again. Raises OSError where the
    folder cannot be written to.
    """
    path = os.path.join(folder, probe_name())
    try:
        file = create(path, direct=True)
    except OSError as error:
        if error.errno not in (errno.EINVAL, *NO_SPACE):
            raise
        return False
    with suppress(FileNotFoundError):  # another process takes it for a leftover
        os.unlink(path)  # now: a process that is killed here leaves nothing
    try:
        with mmap.mmap(-1, ALIGNMENT) as memory:
            return os.pwrite(file, memory, 0) == os.preadv(file, [memory], 0) == ALIGNMENT
    except OSError as error:
        if error.errno not in (errno.EINVAL, *NO_SPACE):
            raise
        return error.errno != errno.EINVAL
    finally:
        os.close(file)


def read_pages(file: int, pages: Sequence[torch.Tensor], offset: int) -> None:
    """Fill pages that lie one after another from `offset` on, each padded to a multiple of 4096.

    Raises BadFileError where the file ends before; OSError.
    """
    vectors = _vectors(pages)
    for views, start in _calls(vectors.views, offset):
        wanted = sum(map(len, views))
        if _move(os.preadv, file, views, start) != wanted and not _read_on(file, views, start):
            raise BadFileError("truncated", "it ends within its layers")
    for page, stand_in in vectors.stand_ins:
        page[:] = stand_in


def read_bytes(file: int, num_bytes: int) -> bytes:
    """The first bytes of a file, fewer where it ends; `num_bytes` is a multiple of 4096. Raises OSError."""
    with mmap.mmap(-1, num_bytes) as memory:
        got = _move(os.preadv, file, [memory], 0)
        return memory[:got]


def write_pages(file: int, pages: Sequence[torch.Tensor], offset: int) -> None:
    """Write pages one after another from `offset` on, each padded to a multiple of 4096. Raises OSError."""
    vectors = _vectors(pages)
    for page, stand_in in vectors.stand_ins:
        stand_in[:] = page
    for views, start in _calls(vectors.views, offset):
        _write_all(file, views, start)


def write_bytes(file: int, data: bytes) -> None:
    """Write the first bytes of a file; their number is a multiple of 4096. Raises OSError."""
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    _write_all(file, [memoryview(memory)], 0)


def bytes_of(page: torch.Tensor) -> memoryview:
    """The memory of a page, uint8 (bytes,), on the host."""
    return page.numpy().data


def _move(call: _Call, file: int, views: Sequence[_Buffer], offset: int) -> int:
    """Read or write, through the page cache where this memory cannot be read or written directly."""
    try:
        return call(file, views, offset)
    except OSError as error:
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        if error.errno not in (errno.EFAULT, errno.EINVAL) or not flags & _DIRECT:
            raise
        _tell_of_refusal(str(error))
        fcntl.fcntl(file, fcntl.F_SETFL, flags & ~_DIRECT)
        return call(file, views, offset)


@cache
def _tell_of_refusal(reason: str) -> None:
    log.warning("tier disk: pages are moved through the page cache, O_DIRECT does not take them: %s", reason)


def _vectors(pages: Sequence[torch.Tensor]) -> _Vectors:
    vectors = _Vectors([], [])
    for page in pages:
        view = bytes_of(page)
        fitting = 0 if page.data_ptr() % ALIGNMENT else len(view) - len(view) % ALIGNMENT
        if fitting:
            vectors.views.append(view[:fitting])
        if rest := len(view) - fitting:
            buffer = memoryview(mmap.mmap(-1, align(rest)))
            vectors.views.append(buffer)
            vectors.stand_ins.append((view[fitting:], buffer[:rest]))
    return vectors


def _calls(views: list[memoryview], offset: int) -> list[tuple[list[memoryview], int]]:
    """What goes into one call each, and where it begins."""
    calls = []
    for first in range(0, len(views), _MOST_VECTORS):
        calls.append((views[first : first + _MOST_VECTORS], offset))
        offset += sum(map(len, calls[-1][0]))
    return calls


def _read_on(file: int, views: list[memoryview], offset: int) -> bool:
    """Read again piece by piece: one call has an upper bound, and may be interrupted."""
    for view in views:
        done = 0
        while done < len(view):
            got = _move(os.preadv, file, [view[done:]], offset + done)
            # O_DIRECT breaks off between sectors only, unless the file ends.
            if got <= 0 or (got % ALIGNMENT and fcntl.fcntl(file, fcntl.F_GETFL) & _DIRECT):
                return False
            done += got
        offset += len(view)
    return True


def _write_all(file: int, views: list[memoryview], offset: int) -> None:
    while views:
        written = _move(os.pwritev, file, views, offset)
        offset += written
        while views and written >= len(views[0]):
            written -= len(views[0])
            views = views[1:]
        if written:
            views = [views[0][written:], *views[1:]]
