"""Reads layers of chunks from the disk; what is not the file that was written is a miss, and set aside."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

import torch

from lwkv.keys import LayerKey
from lwkv.storage.disk.checksum import checksum
from lwkv.storage.disk.folder import NO_FILE, Folder
from lwkv.storage.disk.format import BadFileError, FileForm, Header, header_size, unpack
from lwkv.storage.disk.header_cache import BadFiles, Headers
from lwkv.storage.disk.io import bytes_of, open_to_read, read_bytes, read_pages
from lwkv.storage.tier import Status
from lwkv.telemetry.counters import Counters


class OtherFormError(Exception):
    """A whole file of this chunk that somebody wrote in another form, such as another version of lwkv."""


class DiskReader:
    """Reads chunks of one form. Thread-safe."""

    def __init__(self, folder: Folder, form: FileForm, headers: Headers, counters: Counters) -> None:
        self._folder = folder
        self._form = form
        self._headers = headers
        self._counters = counters
        self._bad_files = BadFiles()

    def is_there(self, key: str) -> bool:
        """Whether a chunk has a file of the right size; another one is looked into, and set aside if bad."""
        if key in self._bad_files and self._bad_files.is_still(key, self._folder.version_of(key)):
            return False
        size = self._folder.size_of(key)
        if size is None or size == self._form.file_bytes:
            return size is not None
        self._judge(key, lambda: self._look_into(key, size))
        return False

    def can_be_opened(self, key: str) -> bool:
        """Whether this process may read a chunk's file."""
        return self._judge(key, lambda: self._open(key)) is Status.OK

    def read_run(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor]) -> list[Status]:
        """Fill pages with neighbouring layers of one chunk, by one call; a status for each.

        Where anything is not as it should be, each layer is read again by itself, and judged.
        """
        if len(keys) > 1 and self._fill_all(keys[0].chunk.to_string(), keys[0].layer, pages):
            return [Status.OK] * len(keys)
        return [self.read(key, page) for key, page in zip(keys, pages, strict=True)]

    def read(self, key: LayerKey, page: torch.Tensor) -> Status:
        """Fill a page with a layer. Raises OSError where it is not the file that is wrong."""
        text = key.chunk.to_string()
        return self._judge(text, lambda: self._fill(text, key.layer, page))

    def _judge(self, key: str, work: Callable[[], Status]) -> Status:
        """Do something with a chunk's file, which is set aside where it is bad."""
        try:
            return work()
        except FileNotFoundError:
            return Status.MISS
        except OtherFormError:
            return self._is_useless(key, "other_form")
        except PermissionError:
            return self._is_useless(key, "unreadable")
        except BadFileError as error:
            self._set_aside(key, error.reason, str(error))
            return Status.MISS
        except OSError as error:
            if self._folder.size_of(key) == NO_FILE:
                self._set_aside(key, "foreign", "it is no ordinary file")
                return Status.MISS
            if error.errno != errno.EIO:
                raise
            self._counters.add("disk_io_errors")
            return Status.ERROR

    def _is_useless(self, key: str, reason: str) -> Status:
        self._counters.add(f"disk_{reason}")
        self._bad_files.note(key, self._folder.version_of(key))
        return Status.MISS

    def _set_aside(self, key: str, reason: str, text: str) -> None:
        self._folder.set_aside(key, reason, text)
        if (still := self._folder.version_of(key)) is not None:
            self._bad_files.note(key, still)

    def _fill(self, key: str, layer: int, page: torch.Tensor) -> Status:
        file = open_to_read(self._folder.chunk_path(key), self._folder.direct)
        try:
            header = self._headers.get(key) or self._read_header(file, key)
            if layer >= self._form.num_layers:
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

    def _fill_all(self, key: str, first: int, pages: Sequence[torch.Tensor]) -> bool:
        """Whether pages were filled with the layers of a chunk from the first on, and all are whole."""
        try:
            file = open_to_read(self._folder.chunk_path(key), self._folder.direct)
        except OSError:
            return False
        try:
            header = self._headers.get(key) or self._read_header(file, key)
            read_pages(file, pages, self._form.offset(first))
            found = [checksum(bytes_of(page)) for page in pages]
            return found == [entry.checksum for entry in header.layers[first : first + len(pages)]]
        except (OSError, BadFileError, OtherFormError):
            return False
        finally:
            os.close(file)

    def _open(self, key: str) -> Status:
        os.close(open_to_read(self._folder.chunk_path(key), self._folder.direct))
        return Status.OK

    def _look_into(self, key: str, size: int) -> Status:
        """Find out why a file has not the size that it would have in this form: always raises."""
        file = open_to_read(self._folder.chunk_path(key), self._folder.direct)
        try:
            header = self._read_header(file, key)
        finally:
            os.close(file)
        raise BadFileError("truncated", f"it has {size} bytes for {len(header.layers)} layers")

    def _read_header(self, file: int, key: str) -> Header:
        data = read_bytes(file, self._form.header_bytes)
        try:
            if (num_bytes := header_size(data)) > self._form.header_bytes:
                data = read_bytes(file, num_bytes)
            header = unpack(data)
        except BadFileError as error:
            if error.reason == "version":
                raise OtherFormError from error
            raise
        if header.key != key:
            raise BadFileError("foreign", f"it holds {header.key}")
        checksums = [entry.checksum for entry in header.layers]
        if len(checksums) != self._form.num_layers or header != self._form.header(key, checksums):
            raise OtherFormError
        self._headers.keep(key, header)
        return header
