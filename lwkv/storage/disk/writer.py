"""Chunks on their way to the disk: layers are written as they come, and become visible together."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lwkv.background.workers import Workers
from lwkv.storage.disk.checksum import checksum
from lwkv.storage.disk.folder import Draft, Folder
from lwkv.storage.disk.format import FileForm, pack
from lwkv.storage.disk.header_cache import Headers
from lwkv.storage.disk.io import NO_SPACE, bytes_of, write_bytes, write_pages

NUM_THREADS = 4


@dataclass
class _Writing:
    """A chunk whose layers are being put, and the checksums of those that are."""

    draft: Draft
    checksums: dict[int, int] = field(default_factory=dict)


class DiskWriter:
    """Writes chunks of one form, each by one thread at a time; checksums are computed meanwhile."""

    def __init__(self, folder: Folder, form: FileForm, headers: Headers) -> None:
        self._folder = folder
        self._form = form
        self._headers = headers
        self._writing: dict[str, _Writing] = {}
        self._lock = threading.Lock()
        self._workers = Workers("disk-checksum", NUM_THREADS)

    def put(self, key: str, pages: Mapping[int, torch.Tensor]) -> bool:
        """Write layers of a chunk that is not there; with layer 0 it becomes visible.

        False where layer 0 comes before the others, which ends the chunk. Raises OSError, which ends it too.
        """
        with self._lock:
            writing = self._writing.pop(key, None)
        if writing is None:
            if 0 in pages and len(pages) < self._form.num_layers:
                return False
            writing = _Writing(self._folder.begin(key, self._form.file_bytes))
        try:
            self._write(writing, pages)
            if 0 in pages:
                return self._finish(key, writing)
        except BaseException as error:
            self._folder.discard(writing.draft)
            if isinstance(error, OSError) and error.errno in NO_SPACE:
                self._folder.make_way(key, self._form.file_bytes)
            raise
        self._keep_for_later(key, writing)
        return True

    def is_writing(self, key: str) -> bool:
        """Whether some layers of a chunk are written and others are to come."""
        return key in self._writing

    def close(self) -> None:
        """Remove what is not complete."""
        self._workers.close(0)
        with self._lock:
            left, self._writing = self._writing, {}
        for writing in left.values():
            self._folder.discard(writing.draft)

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


def _runs(layers: Sequence[int]) -> list[list[int]]:
    """Neighbouring layers, which are neighbours in the file too, together."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs
