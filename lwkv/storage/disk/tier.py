"""The disk tier: one file a chunk in a folder, which survives restarts and may be shared by processes."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from lwkv.background.workers import Workers
from lwkv.config.messages import shown
from lwkv.config.secrets import cut
from lwkv.config.settings import Config
from lwkv.errors import ClosedError, ConfigError
from lwkv.keys import ChunkKey, LayerKey
from lwkv.storage.disk.checksum import checksum_by
from lwkv.storage.disk.folder import Folder, PromptTooLargeError
from lwkv.storage.disk.format import FileForm
from lwkv.storage.disk.header_cache import Headers
from lwkv.storage.disk.io import reads_directly
from lwkv.storage.disk.reader import DiskReader
from lwkv.storage.disk.writer import DiskWriter
from lwkv.storage.tier import WARNING, Status, TierSetup
from lwkv.telemetry.counters import Counters

log = logging.getLogger(__name__)

NUM_THREADS = 8


class FilesOfForm(NamedTuple):
    """What reads and writes the chunks of one form."""

    reader: DiskReader
    writer: DiskWriter


class DiskTier:
    """Chunks in a folder. Layers become visible together, when the file has its last name.

    Whatever is not the file that was written is a miss, a counter and a line in the log, and set aside.

    Args:
        form: of the files.
        others: of files of chunks that have another form, by the namespace of their keys.
    """

    name = "disk"

    def __init__(
        self, folder: Folder, form: FileForm, counters: Counters, others: Mapping[str, FileForm] | None = None
    ) -> None:
        self._folder = folder
        self._counters = counters
        self._files = self._open(form)
        self._others = {namespace: self._open(other) for namespace, other in (others or {}).items()}
        self._workers = Workers("disk-read", NUM_THREADS)
        self._closed = False

    def contains(self, keys: Sequence[ChunkKey], deadline_s: float) -> list[bool]:
        self._require_open()
        return [self._of(key).reader.is_there(key.to_string()) for key in keys]

    def follow(self, prompt: Sequence[ChunkKey], deadline_s: float) -> None:
        self._require_open()
        self._folder.follow([key.to_string() for key in prompt])

    def get(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor], deadline_s: float) -> list[Status]:
        self._require_open()
        runs = neighbours(keys)
        size = max(1, -(-len(runs) // NUM_THREADS))
        parts = [partial(self._read_runs, runs[i : i + size], keys, pages) for i in range(0, len(runs), size)]
        if len(parts) <= 1:  # on this thread: another one would have to wake up
            return [status for part in parts for status in part()]
        # First come, first served: the threads finish one layer before they begin with the next.
        read = [self._workers.submit(part) for part in parts]
        wait(read)  # all of them: where one failed, another may still be filling its pages
        return [status for part in read for status in part.result()]

    def put(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor], deadline_s: float) -> list[Status]:
        self._require_open()
        chunks: dict[ChunkKey, dict[int, torch.Tensor]] = {}
        for (chunk, layer), page in zip(keys, pages, strict=True):
            chunks.setdefault(chunk, {})[layer] = page
        kept = {chunk: self._put_chunk(chunk, layers) for chunk, layers in chunks.items()}
        return [kept[key.chunk] for key in keys]

    def close(self) -> None:
        self._closed = True
        self._workers.close(0)
        for files in (self._files, *self._others.values()):
            files.writer.close()

    def gauges(self) -> dict[str, int]:
        """What is there now."""
        return {"used_bytes": self._folder.used_bytes, "files": self._folder.num_files}

    def _read_runs(
        self, runs: Sequence[slice], keys: Sequence[LayerKey], pages: Sequence[torch.Tensor]
    ) -> list[Status]:
        readers = [self._of(keys[run.start].chunk).reader for run in runs]
        return [
            status
            for run, reader in zip(runs, readers, strict=True)
            for status in reader.read_run(keys[run], pages[run])
        ]

    def _put_chunk(self, key: ChunkKey, pages: Mapping[int, torch.Tensor]) -> Status:
        try:
            return Status.OK if self._is_kept(key.to_string(), pages, *self._of(key)) else Status.ERROR
        except PromptTooLargeError:
            self._counters.add("disk_refused")
            return Status.MISS

    def _is_kept(
        self, key: str, pages: Mapping[int, torch.Tensor], reader: DiskReader, writer: DiskWriter
    ) -> bool:
        if writer.is_writing(key) or not self._folder.has(key):
            return writer.put(key, pages)
        # What has the name and can neither be used nor set aside stays there, and nothing is kept.
        if reader.is_there(key):
            return reader.can_be_opened(key)
        return not self._folder.has(key) and writer.put(key, pages)

    def _open(self, form: FileForm) -> FilesOfForm:
        headers = Headers()
        reader = DiskReader(self._folder, form, headers, self._counters)
        return FilesOfForm(reader, DiskWriter(self._folder, form, headers))

    def _of(self, key: ChunkKey) -> FilesOfForm:
        return self._others.get(key.namespace, self._files)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the disk tier is closed")


def neighbours(keys: Sequence[LayerKey]) -> list[slice]:
    """Where keys name neighbouring layers of one chunk: these lie in its file one behind the other."""
    runs: list[slice] = []
    for i, key in enumerate(keys):
        if i and key == LayerKey(keys[i - 1].chunk, keys[i - 1].layer + 1):
            runs[-1] = slice(runs[-1].start, i + 1)
        else:
            runs.append(slice(i, i + 1))
    return runs


def open_tier(url: str, setup: TierSetup) -> DiskTier:
    """Open the folder of a file:// URL; a missing one is made, its parent is not. Raises ConfigError."""
    path, limit = _path(url), setup.config.max_disk_bytes
    form = FileForm(setup.num_layers, setup.page_bytes, setup.page_format)
    others = {namespace: replace(form, num_layers=number) for namespace, number in setup.layers.items()}
    largest = max(each.file_bytes for each in (form, *others.values()))
    if largest > limit:
        raise ConfigError(f"max_local_disk_size holds {limit} bytes, but one chunk needs {largest}: raise it")
    _refuse_address(path)
    try:
        with suppress(FileExistsError):
            os.mkdir(path)
        direct, timeout_s = reads_directly(path), setup.config.load_timeout_s
        folder = Folder(path, limit, direct, setup.counters, timeout_s=timeout_s)
    except OSError as error:
        raise _unusable(path, error) from None
    log.info("tier disk: %s has %d files; %s", path, folder.num_files, _way(folder.direct))
    return DiskTier(folder, form, setup.counters, others)


def examine(url: str, config: Config) -> Mapping[str, str]:
    """Tell how the folder is. Raises ConfigError where it cannot be used."""
    path = _path(url)
    _refuse_address(path)
    parent = os.path.dirname(os.path.abspath(path))
    if not os.path.lexists(path) and os.path.isdir(parent):
        found = {"folder": path, "files": "none: the folder is made when an engine starts"}
        return found | _beyond(parent, 0, config)
    try:
        direct, free = reads_directly(path), os.statvfs(path)
        folder = Folder(path, 1 << 62, direct, Counters())  # nothing is removed
    except OSError as error:
        raise _unusable(path, error) from None
    return {
        "folder": path,
        "files": str(folder.num_files),
        "used": f"{folder.used_bytes / 2**30:.2f} of {config.max_local_disk_size:g} GiB",
        "free on its file system": f"{free.f_bavail * free.f_frsize / 2**30:.1f} GiB",
        "access": _access(path),
        "reads and writes": _way(direct),
        "checksums by": checksum_by() + (": the package isal is faster" if checksum_by() == "zlib" else ""),
    } | _beyond(path, folder.used_bytes, config)


def _refuse_address(path: str) -> None:
    """Raise ConfigError for what is not there and may be an address: no folder of that name is to be made."""
    if not os.path.lexists(path) and cut(path) != path:
        raise ConfigError(
            f"local_disk: {shown(path)} is not there, and is not made: it may be an address; give a folder, "
            "make it yourself, or leave local_disk out"
        )


def _beyond(path: str, used: int, config: Config) -> dict[str, str]:
    """A warning where the file system is full before the limit is reached."""
    there = os.statvfs(path)
    room = used + there.f_bavail * there.f_frsize
    if config.max_disk_bytes <= room:
        return {}
    text = (
        f"max_local_disk_size is {config.max_local_disk_size:g} GiB, but its file system has room for "
        f"{room / 2**30:.1f} GiB of chunks: lower it, or free space"
    )
    return {WARNING: text}


def _path(url: str) -> str:
    return url.removeprefix("file://")


def _way(direct: bool) -> str:
    return "direct (O_DIRECT)" if direct else "buffered: this file system refuses O_DIRECT"


def _access(path: str) -> str:
    """Who else than its owner may do what with the folder: the files in it are for their owners only."""
    mode = stat.S_IMODE(os.stat(path).st_mode)
    writers = [who for who, bit in (("its group", stat.S_IWGRP), ("everybody", stat.S_IWOTH)) if mode & bit]
    if not writers:
        return f"only its owner may write to it (mode {mode:04o})"
    return (
        f"{' and '.join(writers)} may write to it (mode {mode:04o}), and what they put there is trusted: "
        "chmod 700, unless that is wanted"
    )


def _unusable(path: str, error: OSError) -> ConfigError:
    parent = os.path.dirname(os.path.abspath(path))
    missing = f" ({shown(parent)} is not there, and only the last folder of a path is made)"
    return ConfigError(
        f"local_disk: {shown(path)} cannot be used: {error.strerror or error}"
        f"{'' if os.path.lexists(parent) else missing}; give a folder that can be written to, or leave "
        "local_disk out"
    )
