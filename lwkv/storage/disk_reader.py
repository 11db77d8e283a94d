"""Reads layers of chunks from the disk; what is not the file that was written is a miss, and set aside."""

from __future__ import annotations

import errno
import os

import torch

from lwkv.counters import Counters
from lwkv.keys import LayerKey
from lwkv.storage.checksum import checksum
from lwkv.storage.disk_folder import NO_FILE, Folder
from lwkv.storage.disk_format import BadFileError, FileForm, Header, unpack
from lwkv.storage.disk_headers import Headers
from lwkv.storage.disk_io import bytes_of, open_to_read, read_bytes, read_pages
from lwkv.storage.tier import Status


class DiskReader:
    """Reads chunks of one form. Thread-safe."""

    def __init__(self, folder: Folder, form: FileForm, headers: Headers, counters: Counters) -> None:
        self._folder = folder
        self._form = form
        self._headers = headers
        self._counters = counters

    def is_there(self, key: str) -> bool:
        """Whether a chunk has a file of the right size; one of another size is set aside."""
        size = self._folder.size_of(key)
        if size is None or size == self._form.file_bytes:
            return size is not None
        reason = "truncated" if 0 <= size < self._form.file_bytes else "foreign"
        self._folder.set_aside(key, reason, f"it has {size} bytes, not {self._form.file_bytes}")
        return False

    def read(self, key: LayerKey, page: torch.Tensor) -> Status:
        """Fill a page with a layer. Raises OSError where it is not the file that is wrong."""
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
