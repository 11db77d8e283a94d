"""A folder of chunk files, bounded in bytes, that several processes may share."""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from lwkv.storage.disk.drafts import Drafts
from lwkv.storage.disk.header_cache import Version
from lwkv.storage.disk.io import NO_SPACE, bytes_taken, create
from lwkv.storage.disk.lock import FolderLock, is_owned, locked, own, used_in
from lwkv.storage.disk.lru import Spared, Uses
from lwkv.storage.disk.names import BAD_SUFFIX, CHUNK_SUFFIX, FileKind, draft_name, kind_of
from lwkv.telemetry.counters import Counters

log = logging.getLogger(__name__)

NO_FILE = -1
RESCAN_S = 30.0
NOTHING_SPARED = Spared()
SET_ASIDE_S = 1.0
_BEING_MADE = (FileKind.DRAFT, FileKind.PROBE)
_NOT_OFFERED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True, slots=True)
class Draft:
    """A file that is being written: under another name, its space taken, marked as this process's."""

    key: str
    path: str
    file: int
    num_bytes: int


class DiskFullError(OSError):
    """The file system has no space, though the limit is not reached."""


class NoRoomError(OSError):
    """The limit is reached, and nothing more can go."""


class PromptTooLargeError(Exception):
    """There is only room for a chunk where those before it are."""


class Folder:
    """Chunk files by the text of their key; room is made at the end of prompts, see Uses. Thread-safe.

    Files are added and removed under the folder's lock, so that all processes together keep `max_bytes`. What
    another process does is seen by looking, never assumed: a file may appear and vanish at any time.

    Raises:
        OSError: the folder is not there, or cannot be read or written to.
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
        self._uses = Uses()
        self._drafts = Drafts()
        self._scanned_at = float("-inf")
        try:
            with locked(path, timeout_s) as lock:
                self._scan(lock)
                self._make_room(lock, 0)
        except OSError as error:
            if not isinstance(error, TimeoutError) and error.errno not in NO_SPACE:
                raise
            log.warning("tier disk: cannot list %s now, will retry: %s", path, error)

    @property
    def num_files(self) -> int:
        return len(self._uses)

    @property
    def used_bytes(self) -> int:
        """What all files of all processes have together, as counted last; takes no lock. Raises OSError."""
        return used_in(self.path)

    def chunk_path(self, key: str) -> str:
        return os.path.join(self.path, key + CHUNK_SUFFIX)

    def size_of(self, key: str) -> int | None:
        """The bytes of a chunk's file, whoever wrote it; NO_FILE for another thing, None for nothing."""
        try:
            found = os.stat(self.chunk_path(key), follow_symlinks=False)
        except FileNotFoundError:
            self._uses.forget(key + CHUNK_SUFFIX)
            return None
        if not stat.S_ISREG(found.st_mode):
            return NO_FILE
        self._uses.add(key + CHUNK_SUFFIX, found.st_mtime)
        return found.st_size

    def version_of(self, key: str) -> Version | None:
        """Which file a chunk has now; None for none."""
        try:
            found = os.stat(self.chunk_path(key), follow_symlinks=False)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def has(self, key: str) -> bool:
        """Whether anything has the name of this chunk's file."""
        return os.path.lexists(self.chunk_path(key))

    def follow(self, prompt: Sequence[str]) -> None:
        """Note that chunks in a row are used, for this process and, now and then, for the others."""
        names = [key + CHUNK_SUFFIX for key in prompt]
        for name in self._uses.unknown(names):
            self.size_of(name.removesuffix(CHUNK_SUFFIX))  # another process may have written it
        self._note_use(names)

    def begin(self, key: str, num_bytes: int) -> Draft:
        """Take space for a chunk's file, removing others if need be, but none of the chunks before it.

        Raises OSError: no space, though all that can go went. PromptTooLargeError. TimeoutError: the lock.
        """
        try:
            return self._begin(key, num_bytes)
        except DiskFullError:
            self.make_way(key, num_bytes)
            return self._begin(key, num_bytes)

    def make_way(self, key: str, num_bytes: int) -> None:
        """Remove files of so many bytes for a chunk, or all: the disk is full before the limit is."""
        self._counters.add("disk_no_space")
        spared = Spared(self._uses.before(key + CHUNK_SUFFIX))
        with locked(self.path, self._timeout_s) as lock:
            while num_bytes > 0 and (freed := self._remove_oldest(lock, spared)):
                num_bytes -= freed

    def commit(self, draft: Draft) -> None:
        """Make a complete file visible; where another process was faster, its file stays. Raises OSError."""
        name = draft.key + CHUNK_SUFFIX
        path = os.path.join(self.path, name)
        at = self._uses.time_for(name, self._clock())
        os.utime(draft.path, (at, at))
        with locked(self.path, self._timeout_s) as lock:
            if os.path.lexists(path):
                os.unlink(draft.path)
                lock.used -= draft.num_bytes
            else:
                os.rename(draft.path, path)
        os.close(draft.file)
        self._uses.add(name, at)
        self._note_use([name])
        self._drafts.end(name)

    def discard(self, draft: Draft) -> None:
        """Remove a file that is not complete, and give its space back."""
        with suppress(OSError), locked(self.path, self._timeout_s) as lock:
            os.unlink(draft.path)
            lock.used -= draft.num_bytes
        os.close(draft.file)
        self._drafts.end(draft.key + CHUNK_SUFFIX)

    def set_aside(self, key: str, reason: str, text: str) -> None:
        """Give a chunk's file a name that nobody looks for; it is the next one to be removed."""
        path, bad = self.chunk_path(key), key + BAD_SUFFIX
        if _is_folder(path):
            bad += f"-{os.urandom(4).hex()}"  # somebody else's, which is not removed for another one
        self._counters.add(f"disk_{reason}")
        try:
            with locked(self.path, SET_ASIDE_S) as lock:
                self._rename_to_bad(lock, path, bad)
        except OSError as error:
            log.warning("tier disk: %s cannot be set aside (%s): %s", path, text, error)
        else:
            log.warning("tier disk: %s is set aside as %s: %s", path, bad, text)

    def _note_use(self, names: Sequence[str]) -> None:
        """Note that these files are used, and set their times for the others; raises nothing."""
        for name, at in self._uses.follow(names, self._clock()).items():
            with suppress(OSError):
                os.utime(os.path.join(self.path, name), (at, at))

    def _rename_to_bad(self, lock: FolderLock, path: str, bad: str) -> None:
        bad_path = os.path.join(self.path, bad)
        # Where a folder has that name there is none for what is bad, and it goes at once.
        goes = path if _is_folder(bad_path) else bad_path
        with suppress(FileNotFoundError):
            num_bytes = bytes_taken(os.stat(goes, follow_symlinks=False))
            os.unlink(goes)
            lock.used -= num_bytes
        self._uses.forget(os.path.basename(path))
        if goes == bad_path:
            os.rename(path, bad_path)
            self._uses.evict_first(bad)

    def _begin(self, key: str, num_bytes: int) -> Draft:
        deadline = time.monotonic() + self._timeout_s / 2
        while (draft := self._begin_or_wait(key, num_bytes, deadline)) is None:
            pass
        return draft

    def _begin_or_wait(self, key: str, num_bytes: int, deadline: float) -> Draft | None:
        """Take space, or wait for what else this process is writing: None where some of it has ended.

        Several are written at a time. What is behind this chunk may have come first, and goes from its end
        when all of it is there.
        """
        before = self._uses.before(key + CHUNK_SUFFIX)
        for spared in (Spared(before, orphans=True), Spared(before)):
            ended = self._drafts.num_ended
            try:
                return self._new_draft(key, num_bytes, spared)
            except NoRoomError as error:
                full = error
            if self._drafts.wait_for_another(ended, before, deadline):
                return None
        if self._drafts.has_others(before):
            if time.monotonic() < deadline:
                return None  # they have begun meanwhile
        elif self._drafts or len(self._uses.unknown(before)) < len(before):
            raise PromptTooLargeError(key) from full
        raise full

    def _new_draft(self, key: str, num_bytes: int, spared: Spared) -> Draft:
        path = os.path.join(self.path, draft_name(key))
        with locked(self.path, self._timeout_s) as lock:
            if not self._make_room(lock, num_bytes, spared):
                text = f"max_local_disk_size of {self._max_bytes} bytes is taken"
                raise NoRoomError(errno.ENOSPC, text, path)
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
            self._drafts.begin(key + CHUNK_SUFFIX)
        self._reserve(draft)
        return draft

    def _reserve(self, draft: Draft) -> None:
        """Take the space on the disk now: a write that breaks off later is a write in vain."""
        try:
            os.posix_fallocate(draft.file, 0, draft.num_bytes)
        except OSError as error:
            if error.errno in _NOT_OFFERED:
                return
            self.discard(draft)
            if error.errno in NO_SPACE:
                raise DiskFullError(*error.args) from error
            raise

    def _make_room(self, lock: FolderLock, num_bytes: int, spared: Spared = NOTHING_SPARED) -> bool:
        scanned = False
        while self._is_full(lock, num_bytes):
            if not scanned and (lock.used < 0 or time.monotonic() - self._scanned_at > RESCAN_S):
                self._scan(lock)
                scanned = True
            elif not self._remove_oldest(lock, spared):
                if scanned:
                    return False
                self._scan(lock)
                scanned = True
        return True

    def _is_full(self, lock: FolderLock, num_bytes: int) -> bool:
        used = lock.used
        return used < 0 or used + num_bytes > self._max_bytes

    def _remove_oldest(self, lock: FolderLock, spared: Spared) -> int:
        """Remove the next file to go, nothing `spared`; how many bytes that gives back, 0 for none."""
        while (oldest := self._uses.take_oldest(spared, self._clock())) is not None:
            name, used_at = oldest
            path = os.path.join(self.path, name)
            try:
                found = os.stat(path, follow_symlinks=False)
                if found.st_mtime > used_at + 1 and name.endswith(CHUNK_SUFFIX):
                    self._uses.add(name, found.st_mtime)  # another process has used it since
                    continue
                os.unlink(path)
            except (FileNotFoundError, IsADirectoryError, PermissionError):
                continue
            lock.used -= bytes_taken(found)
            self._counters.add("disk_evicted")
            return max(1, bytes_taken(found))
        return 0

    def _scan(self, lock: FolderLock) -> None:
        """Count what is there, learn of what others wrote and used, and remove what dead processes left."""
        self._scanned_at, used = time.monotonic(), 0
        found: dict[str, float] = {}
        with os.scandir(self.path) as entries:
            for entry in entries:
                # What is no ordinary file is nothing of lwkv's, whatever its name: `lwkv inspect` removes it.
                kind = kind_of(entry.name) if entry.is_file(follow_symlinks=False) else None
                if kind is None or (kind in _BEING_MADE and self._remove_leftover(entry.path)):
                    continue
                with suppress(FileNotFoundError):
                    there = entry.stat(follow_symlinks=False)
                    # Not all of a file that is being written need be on the disk yet.
                    used += there.st_size if kind in _BEING_MADE else bytes_taken(there)
                    if kind not in _BEING_MADE:
                        found[entry.name] = there.st_mtime if kind is FileKind.CHUNK else 0.0
        lock.used = used
        self._uses.renew(found)

    def _remove_leftover(self, path: str) -> bool:
        """Whether the file at `path` has no writer any more, and is gone."""
        if is_owned(path):
            return False
        with suppress(FileNotFoundError, PermissionError):
            os.unlink(path)
            self._counters.add("disk_leftovers")
        return True


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)
