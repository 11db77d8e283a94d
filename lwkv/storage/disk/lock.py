"""The lock of a folder that several processes keep chunks in, and the bytes that they keep there together."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lwkv.storage.disk.io import OWNER_ONLY

LOCK_NAME = ".lwkv-lock"
_POLL_S = 0.001
_USED = struct.Struct("<q")


class FolderLock:
    """Held by whoever counts, adds or removes files; no reader needs it. For the holder only.

    `used` is what all files have together, in bytes; -1 where nobody has counted yet. The system ends the
    lock of a process that dies; what it counted last may then be wrong until somebody counts anew.
    """

    def __init__(self, file: int) -> None:
        self._file = file

    @property
    def used(self) -> int:
        data = os.pread(self._file, _USED.size, 0)
        return int(_USED.unpack(data)[0]) if len(data) == _USED.size else -1

    @used.setter
    def used(self, num_bytes: int) -> None:
        os.pwrite(self._file, _USED.pack(max(0, num_bytes)), 0)


def used_in(folder: str) -> int:
    """`FolderLock.used`, without the lock. Raises OSError."""
    file = _open(os.path.join(folder, LOCK_NAME), os.O_RDONLY)
    try:
        return FolderLock(file).used
    finally:
        os.close(file)


@contextmanager
def locked(folder: str, timeout_s: float) -> Iterator[FolderLock]:
    """Hold the lock of `folder`. Raises TimeoutError where others hold it for longer; OSError."""
    path = os.path.join(folder, LOCK_NAME)
    # Opened anew each time: somebody may have emptied the folder, and threads are to exclude each other too.
    file = _open(path, os.O_RDWR | os.O_CREAT)
    try:
        deadline = time.monotonic() + timeout_s
        while not _try_lock(file):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"another process has held {path} for over {timeout_s:g} s")
            time.sleep(_POLL_S)
        yield FolderLock(file)
    finally:
        _close(file)


def is_owned(path: str) -> bool:
    """Whether the process that writes the file at `path` is alive: it holds a lock on it."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except PermissionError:
        return True  # another user's, who will see to it
    try:
        return not _try_lock(file)
    finally:
        _close(file)


def own(file: int) -> None:
    """Mark a file as being written by this process, until its descriptor is closed."""
    fcntl.flock(file, fcntl.LOCK_EX)  # waits only for somebody who looks whether it is owned


def _open(path: str, flags: int) -> int:
    """A descriptor of a lock's file. Raises OSError, also where another thing has its name."""
    # Without waiting: a FIFO has somebody at its other end, or nobody.
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, OWNER_ONLY)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "the lock is no regular file; remove it", path)
    return file


def _close(file: int) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked meanwhile has it open, and would keep the lock
    os.close(file)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
