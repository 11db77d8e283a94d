"""The disk tier: one file a chunk in a folder, which survives restarts and may be shared by processes."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial

import torch

from lwkv.config import Config
from lwkv.counters import Counters
from lwkv.errors import ClosedError, ConfigError
from lwkv.keys import ChunkKey, LayerKey
from lwkv.storage.checksum import checksum, checksum_by
from lwkv.storage.disk_folder import NO_FILE, Draft, Folder
from lwkv.storage.disk_format import BadFileError, FileForm, Header, pack, unpack
from lwkv.storage.disk_headers import Headers
from lwkv.storage.disk_io import (
    bytes_of,
    open_to_read,
    read_bytes,
    read_pages,
    reads_directly,
    write_bytes,
    write_pages,
)
from lwkv.storage.tier import Status, TierSetup
from lwkv.workers import Workers

log = logging.getLogger(__name__)

NUM_THREADS = 4


@dataclass
class _Writing:
    """A chunk whose layers are being put, and the checksums of those that are."""

    draft: Draft
    checksums: dict[int, int] = field(default_factory=dict)


class DiskTier:
    """Chunks of one form in a folder. Layers become visible together, when the file has its last name.

    Whatever is not the file that was written is a miss, a counter and a line in the log, and set aside.
    """

    name = "disk"

    def __init__(self, folder: Folder, form: FileForm, counters: Counters) -> None:
        self._folder = folder
        self._form = form
        self._counters = counters
        self._headers = Headers()
        self._writing: dict[str, _Writing] = {}
        self._lock = threading.Lock()
        self._workers = Workers("disk-io", NUM_THREADS)
        self._closed = False

    def contains(self, keys: Sequence[ChunkKey], deadline_s: float) -> list[bool]:
        self._require_open()
        texts = [key.to_string() for key in keys]
        there = [self._is_there(text) for text in texts]
        self._folder.touch([text for text, found in zip(texts, there, strict=True) if found])
        return there

    def get(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor], deadline_s: float) -> list[Status]:
        self._require_open()
        size = max(1, -(-len(keys) // NUM_THREADS))
        starts = range(0, len(keys), size)
        # First come, first served: the threads finish one layer before they begin with the next.
        parts = [
            self._workers.submit(
                partial(self._read_all, keys[start : start + size], pages[start : start + size])
            )
            for start in starts
        ]
        wait(parts)  # all of them: where one failed, another may still be filling its pages
        return [status for part in parts for status in part.result()]

    def put(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor], deadline_s: float) -> list[Status]:
        self._require_open()
        chunks: dict[ChunkKey, dict[int, torch.Tensor]] = {}
        for (chunk, layer), page in zip(keys, pages, strict=True):
            chunks.setdefault(chunk, {})[layer] = page
        kept = {chunk: self._put_chunk(chunk.to_string(), layers) for chunk, layers in chunks.items()}
        return [Status.OK if kept[key.chunk] else Status.ERROR for key in keys]

    def close(self) -> None:
        self._closed = True
        self._workers.close(0)
        with self._lock:
            left, self._writing = self._writing, {}
        for writing in left.values():
            self._folder.discard(writing.draft)

    def gauges(self) -> dict[str, int]:
        """What is there now."""
        return {"used_bytes": self._folder.used_bytes, "files": self._folder.num_files}

    def _is_there(self, key: str) -> bool:
        size = self._folder.size_of(key)
        if size is None or size == self._form.file_bytes:
            return size is not None
        reason = "truncated" if 0 <= size < self._form.file_bytes else "foreign"
        text = f"it has {size} bytes, not {self._form.file_bytes}"
        self._folder.set_aside(key, reason, text)
        return False

    def _read_all(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor]) -> list[Status]:
        return [self._read(key, page) for key, page in zip(keys, pages, strict=True)]

    def _read(self, key: LayerKey, page: torch.Tensor) -> Status:
        text = key.chunk.to_string()
        try:
            return self._fill(text, key.layer, page)
        except FileNotFoundError:
            return Status.MISS
        except BadFileError as error:
            self._folder.set_aside(text, error.reason, str(error))
            return Status.MISS
        except OSError as error:
            if self._folder.size_of(text) == NO_FILE:
                self._folder.set_aside(text, "foreign", "it is no ordinary file")
                return Status.MISS
            if error.errno != errno.EIO:
                raise
            self._counters.add("disk_io_errors")
            return Status.ERROR

    def _fill(self, key: str, layer: int, page: torch.Tensor) -> Status:
        file = open_to_read(self._folder.chunk_path(key), self._folder.direct)
        try:
            header = self._headers.get(key) or self._read_header(file, key)
            if layer >= len(header.layers):
                return Status.MISS
            read_pages(file, [page], self._form.offset(layer))
            found = checksum(bytes_of(page))
            if found != header.layers[layer].checksum:
                # Another process may have removed the file and written it anew since its header was read.
                header = self._read_header(file, key)
            if found != header.layers[layer].checksum:
                raise BadFileError("corrupt", f"layer {layer} does not have the checksum it should")
            return Status.OK
        finally:
            os.close(file)

    def _read_header(self, file: int, key: str) -> Header:
        header = unpack(read_bytes(file, self._form.header_bytes))
        if header != self._form.header(key, [entry.checksum for entry in header.layers]):
            raise BadFileError("foreign", f"it holds {header.key}, or layers of another size")
        self._headers.keep(key, header)
        return header

    def _put_chunk(self, key: str, pages: Mapping[int, torch.Tensor]) -> bool:
        with self._lock:
            writing = self._writing.pop(key, None)
        if writing is None:
            if self._is_there(key):
                return True
            if 0 in pages and len(pages) < self._form.num_layers:
                return False
            writing = _Writing(self._folder.begin(key, self._form.file_bytes))
        try:
            self._write(writing, pages)
            if 0 in pages:
                return self._finish(key, writing)
        except BaseException:
            self._folder.discard(writing.draft)
            raise
        self._keep_for_later(key, writing)
        return True

    def _write(self, writing: _Writing, pages: Mapping[int, torch.Tensor]) -> None:
        sums = self._workers.submit(
            lambda: {layer: checksum(bytes_of(page)) for layer, page in pages.items()}
        )
        for run in _runs(sorted(pages)):
            write_pages(writing.draft.file, [pages[layer] for layer in run], self._form.offset(run[0]))
        writing.checksums |= sums.result()

    def _finish(self, key: str, writing: _Writing) -> bool:
        if len(writing.checksums) < self._form.num_layers:
            self._folder.discard(writing.draft)
            return False
        header = self._form.header(key, [writing.checksums[i] for i in range(self._form.num_layers)])
        write_bytes(writing.draft.file, pack(header, self._form.header_bytes))
        self._folder.commit(writing.draft)
        self._headers.keep(key, header)
        return True

    def _keep_for_later(self, key: str, writing: _Writing) -> None:
        with self._lock:
            former = self._writing.get(key)
            self._writing[key] = writing
        if former is not None:
            self._folder.discard(former.draft)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the disk tier is closed")


def open_tier(url: str, setup: TierSetup) -> DiskTier:
    """Open the folder of a file:// URL, which has to be there. Raises ConfigError."""
    path, limit = _path(url), setup.config.max_disk_bytes
    form = FileForm(setup.num_layers, setup.page_bytes, setup.page_format)
    if form.file_bytes > limit:
        raise ConfigError(
            f"max_local_disk_size holds {limit} bytes, but one chunk needs {form.file_bytes}: raise it"
        )
    try:
        folder = Folder(path, limit, reads_directly(path), setup.counters)
    except OSError as error:
        raise _unusable(path, error) from error
    log.info("tier disk: %s has %d files; %s", path, folder.num_files, _way(folder.direct))
    return DiskTier(folder, form, setup.counters)


def examine(url: str, config: Config) -> Mapping[str, str]:
    """Tell how the folder is. Raises ConfigError where it cannot be used."""
    path = _path(url)
    try:
        direct, free = reads_directly(path), os.statvfs(path)
        folder = Folder(path, max(config.max_disk_bytes, 1 << 62), direct, Counters())
    except OSError as error:
        raise _unusable(path, error) from error
    return {
        "folder": path,
        "files": str(folder.num_files),
        "used": f"{folder.used_bytes / 2**30:.2f} of {config.max_local_disk_size:g} GiB",
        "free on its file system": f"{free.f_bavail * free.f_frsize / 2**30:.1f} GiB",
        "reads and writes": _way(direct),
        "checksums by": checksum_by() + (": the package isal is faster" if checksum_by() == "zlib" else ""),
    }


def _path(url: str) -> str:
    return url.removeprefix("file://")


def _way(direct: bool) -> str:
    return "direct (O_DIRECT)" if direct else "buffered: this file system refuses O_DIRECT"


def _unusable(path: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"local_disk: {path!r} cannot be used: {error.strerror or error}; give a folder that is there and "
        "can be written to, or leave local_disk out"
    )


def _runs(layers: Sequence[int]) -> list[list[int]]:
    """Neighbouring layers, which are neighbours in the file too, together."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs
