"""A folder of chunk files, bounded in bytes, that several processes may share."""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from lwkv.counters import Counters
from lwkv.storage.disk_io import create
from lwkv.storage.disk_lock import FolderLock, is_owned, locked, own, used_in

log = logging.getLogger(__name__)

CHUNK_SUFFIX = ".kv"
BAD_SUFFIX = ".bad"
NO_FILE = -1
RESCAN_S = 30.0
TOUCH_S = 10.0
SET_ASIDE_S = 1.0
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_OWN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.[0-9a-f]{32}\.(kv|bad|tmp-[0-9]+-[0-9a-f]{8})")


class Kind(Enum):
    """What a file in the folder is; any other is somebody else's and left alone."""

    CHUNK = "chunk"
    BAD = "set aside"
    DRAFT = "being written"


def kind_of(name: str) -> Kind | None:
    """What the file of this name is; None if it is not lwkv's."""
    match = _OWN.fullmatch(name)
    if match is None:
        return None
    return {"kv": Kind.CHUNK, "bad": Kind.BAD}.get(match[1], Kind.DRAFT)


@dataclass(slots=True)
class Use:
    """When a file was last used, and when the other processes were told of it, in seconds since the epoch."""

    at: float
    told_at: float


@dataclass(frozen=True, slots=True)
class Draft:
    """A file that is being written: under another name, its space taken, marked as this process's."""

    key: str
    path: str
    file: int
    num_bytes: int


class Folder:
    """Chunk files by the text of their key, least recently used first. Thread-safe.

    Files are added and removed under the folder's lock, so that all processes together keep `max_bytes`. What
    another process does is seen by looking, never assumed: a file may appear and vanish at any time.

    Raises:
        OSError: the folder cannot be made or read.
    """

    def __init__(
        self,
        path: str,
        max_bytes: int,
        direct: bool,
        counters: Counters,
        clock: Callable[[], float] = time.time,
        timeout_s: float = 10.0,
    ) -> None:
        self.path = path
        self.direct = direct
        self._max_bytes = max_bytes
        self._counters = counters
        self._clock = clock
        self._timeout_s = timeout_s
        self._files: OrderedDict[str, Use] = OrderedDict()
        self._lock = threading.Lock()
        self._scanned_at = float("-inf")
        try:
            with locked(path, timeout_s) as lock:
                self._scan(lock)
                self._make_room(lock, 0)
        except TimeoutError as error:
            log.warning("tier disk: what is in %s is counted later: %s", path, error)

    @property
    def num_files(self) -> int:
        return len(self._files)

    @property
    def used_bytes(self) -> int:
        """What all files of all processes have together, as counted last; never waits. Raises OSError."""
        return used_in(self.path)

    def chunk_path(self, key: str) -> str:
        return os.path.join(self.path, key + CHUNK_SUFFIX)

    def size_of(self, key: str) -> int | None:
        """The bytes of a chunk's file, whoever wrote it; NO_FILE for another thing, None for nothing."""
        try:
            found = os.stat(self.chunk_path(key), follow_symlinks=False)
        except FileNotFoundError:
            with self._lock:
                self._files.pop(key + CHUNK_SUFFIX, None)
            return None
        if not stat.S_ISREG(found.st_mode):
            return NO_FILE
        with self._lock:
            self._files.setdefault(key + CHUNK_SUFFIX, Use(found.st_mtime, found.st_mtime))
        return found.st_size

    def touch(self, keys: Sequence[str]) -> None:
        """Note that chunks are used, for this process and, now and then, for the others."""
        now, told = self._clock(), []
        with self._lock:
            # Deep chunks are of no use without those before them, so they are to go first.
            for name in (key + CHUNK_SUFFIX for key in reversed(keys)):
                use = self._files.get(name)
                if use is not None:
                    self._files.move_to_end(name)
                    use.at = now
                    if now - use.told_at > TOUCH_S:
                        use.told_at = now
                        told.append(name)
        for name in told:
            with suppress(OSError):
                os.utime(os.path.join(self.path, name), (now, now))

    def begin(self, key: str, num_bytes: int) -> Draft:
        """Take space for a chunk's file, removing those used longest ago if need be.

        Raises OSError: no space, though all that can go went. TimeoutError: the lock.
        """
        draft = self._new_draft(key, num_bytes)
        try:
            os.posix_fallocate(draft.file, 0, num_bytes)
        except OSError as error:
            self.discard(draft)
            if error.errno not in _NO_SPACE:
                raise
            return self._begin_with_less(key, num_bytes)
        return draft

    def commit(self, draft: Draft) -> None:
        """Make a complete file visible; where another process was faster, its file stays. Raises OSError."""
        name = draft.key + CHUNK_SUFFIX
        path = os.path.join(self.path, name)
        with locked(self.path, self._timeout_s) as lock:
            if os.path.lexists(path):
                os.unlink(draft.path)
                lock.used -= draft.num_bytes
            else:
                os.rename(draft.path, path)
        os.close(draft.file)
        now = self._clock()
        with self._lock:
            self._files[name] = Use(now, now)
            self._files.move_to_end(name)

    def discard(self, draft: Draft) -> None:
        """Remove a file that is not complete, and give its space back."""
        with suppress(OSError), locked(self.path, self._timeout_s) as lock:
            os.unlink(draft.path)
            lock.used -= draft.num_bytes
        os.close(draft.file)

    def set_aside(self, key: str, reason: str, text: str) -> None:
        """Give a chunk's file a name that nobody looks for; it is the next one to be removed."""
        path, bad = self.chunk_path(key), key + BAD_SUFFIX
        self._counters.add(f"disk_{reason}")
        try:
            with locked(self.path, SET_ASIDE_S) as lock:
                self._rename_to_bad(lock, path, bad)
        except OSError as error:
            log.warning("tier disk: %s cannot be set aside (%s): %s", path, text, error)
        else:
            log.warning("tier disk: %s is set aside as %s: %s", path, bad, text)

    def _rename_to_bad(self, lock: FolderLock, path: str, bad: str) -> None:
        bad_path = os.path.join(self.path, bad)
        with suppress(FileNotFoundError):
            former = os.stat(bad_path, follow_symlinks=False).st_size
            os.unlink(bad_path)
            lock.used -= former
        os.rename(path, bad_path)
        with self._lock:
            self._files.pop(os.path.basename(path), None)
            self._files[bad] = Use(0.0, 0.0)
            self._files.move_to_end(bad, last=False)

    def _new_draft(self, key: str, num_bytes: int) -> Draft:
        path = os.path.join(self.path, f"{key}.tmp-{os.getpid()}-{os.urandom(4).hex()}")
        with locked(self.path, self._timeout_s) as lock:
            if not self._make_room(lock, num_bytes):
                raise OSError(errno.ENOSPC, f"max_local_disk_size of {self._max_bytes} bytes is taken", path)
            draft = Draft(key, path, create(path, self.direct), num_bytes)
            try:
                # Whoever finds the file from here on finds it with an owner and in its full size.
                own(draft.file)
                os.ftruncate(draft.file, num_bytes)
            except OSError:
                os.close(draft.file)
                os.unlink(path)
                raise
            lock.used += num_bytes
        return draft

    def _begin_with_less(self, key: str, num_bytes: int) -> Draft:
        """The file system is full before `max_bytes` are reached: remove as much as is needed, then try."""
        self._counters.add("disk_no_space")
        with locked(self.path, self._timeout_s) as lock:
            freed = 0
            while freed < num_bytes and (one := self._remove_oldest(lock)):
                freed += one
        draft = self._new_draft(key, num_bytes)
        try:
            os.posix_fallocate(draft.file, 0, num_bytes)
        except OSError:
            self.discard(draft)
            raise
        return draft

    def _make_room(self, lock: FolderLock, num_bytes: int) -> bool:
        scanned = False
        while self._is_full(lock, num_bytes):
            if not scanned and (lock.used < 0 or self._clock() - self._scanned_at > RESCAN_S):
                self._scan(lock)
                scanned = True
            elif not self._remove_oldest(lock):
                if scanned:
                    return False
                self._scan(lock)
                scanned = True
        return True

    def _is_full(self, lock: FolderLock, num_bytes: int) -> bool:
        used = lock.used
        return used < 0 or used + num_bytes > self._max_bytes

    def _remove_oldest(self, lock: FolderLock) -> int:
        """Remove the file used longest ago; how many bytes that gives back, 0 where there is none."""
        while True:
            with self._lock:
                if not self._files:
                    return 0
                name, use = self._files.popitem(last=False)
            path = os.path.join(self.path, name)
            try:
                found = os.stat(path, follow_symlinks=False)
                if found.st_mtime > use.at + 1 and name.endswith(CHUNK_SUFFIX):
                    with self._lock:  # another process has used it since
                        self._files[name] = Use(found.st_mtime, found.st_mtime)
                    continue
                os.unlink(path)
            except (FileNotFoundError, IsADirectoryError):
                continue
            lock.used -= found.st_size
            self._counters.add("disk_evicted")
            return max(1, found.st_size)

    def _scan(self, lock: FolderLock) -> None:
        """Count what is there, learn of what others wrote and used, and remove what dead processes left."""
        self._scanned_at, used = self._clock(), 0
        found: dict[str, Use] = {}
        with os.scandir(self.path) as entries:
            for entry in entries:
                kind = kind_of(entry.name)
                if kind is None or (kind is Kind.DRAFT and self._remove_leftover(entry.path)):
                    continue
                with suppress(FileNotFoundError):
                    there = entry.stat(follow_symlinks=False)
                    used += there.st_size
                    if kind is not Kind.DRAFT:
                        at = there.st_mtime if kind is Kind.CHUNK else 0.0
                        found[entry.name] = Use(at, at)
        lock.used = used
        with self._lock:
            for name, use in found.items():
                known = self._files.get(name)
                use.at = max(use.at, known.at if known else 0.0)
            self._files = OrderedDict(sorted(found.items(), key=lambda item: item[1].at))

    def _remove_leftover(self, path: str) -> bool:
        """Whether the file at `path` has no writer any more, and is gone."""
        if is_owned(path):
            return False
        with suppress(FileNotFoundError):
            os.unlink(path)
            self._counters.add("disk_leftovers")
        return True
