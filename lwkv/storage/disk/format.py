"""The file of one chunk: a header, then its layers, each beginning at a multiple of 4096 bytes.

    magic, version, sizes, checksum of the header
    the key, the page format and the bytes of a page, as JSON
    the layer table: offset, length and checksum of each layer
    zeros up to a multiple of 4096
    layer 0, layer 1, ... each with zeros up to a multiple of 4096

Numbers are little-endian. The first line and the header's checksum are the same in every version. Who may
write to the folder is trusted: checksums are no protection from forgers.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import NamedTuple

from lwkv.storage.disk.checksum import checksum
from lwkv.storage.disk.names import is_key

ALIGNMENT = 4096
VERSION = 1
_MAGIC = b"LWKVDISK"
_PREFIX = struct.Struct("<8sIIIII")
_CHECKSUM_AT = _PREFIX.size - 4
_ENTRY = struct.Struct("<QQI")
_LONGEST_KEY = 161
_MOST_HEADER_BYTES = 1 << 20


class BadFileError(ValueError):
    """A file that is not what it should be; `reason` is one word for counters."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class LayerEntry(NamedTuple):
    """Where a layer lies in its file, in bytes, and its checksum."""

    offset: int
    length: int
    checksum: int


@dataclass(frozen=True)
class Header:
    """What a file says of itself."""

    key: str
    page_format: str
    layers: tuple[LayerEntry, ...]

    @property
    def form(self) -> FileForm:
        """The form of the file that has this header."""
        return FileForm(len(self.layers), self.layers[0].length, self.page_format)


@dataclass(frozen=True)
class FileForm:
    """How the files of one engine's chunks are laid out; sizes in bytes."""

    num_layers: int
    page_bytes: int
    page_format: str

    @property
    def stride(self) -> int:
        """From the beginning of a layer to the next."""
        return align(self.page_bytes)

    @property
    def header_bytes(self) -> int:
        text = _text("x" * _LONGEST_KEY, self.page_format)
        return align(_PREFIX.size + len(text) + self.num_layers * _ENTRY.size)

    @property
    def file_bytes(self) -> int:
        return self.offset(self.num_layers)

    def offset(self, layer: int) -> int:
        return self.header_bytes + layer * self.stride

    def header(self, key: str, checksums: list[int]) -> Header:
        """The header of a chunk whose layers have these checksums."""
        entries = [LayerEntry(self.offset(i), self.page_bytes, each) for i, each in enumerate(checksums)]
        return Header(key, self.page_format, tuple(entries))


def align(num_bytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def pack(header: Header, header_bytes: int) -> bytes:
    """Write a header as `header_bytes` bytes."""
    text = _text(header.key, header.page_format)
    table = b"".join(_ENTRY.pack(*entry) for entry in header.layers)
    prefix = _PREFIX.pack(_MAGIC, VERSION, header_bytes, len(text), len(header.layers), 0)
    data = bytearray((prefix + text + table).ljust(header_bytes, b"\0"))
    data[_CHECKSUM_AT : _PREFIX.size] = struct.pack("<I", checksum(data))
    return bytes(data)


def header_size(start: bytes) -> int:
    """The size of a header by its first bytes. Raises BadFileError: foreign or corrupt."""
    if len(start) < _PREFIX.size or not start.startswith(_MAGIC):
        raise BadFileError("foreign", "it does not begin as a file of lwkv does")
    header_bytes = _PREFIX.unpack_from(start)[2]
    if header_bytes % ALIGNMENT or not 0 < header_bytes <= _MOST_HEADER_BYTES:
        raise BadFileError("corrupt", "its header has an impossible size")
    return int(header_bytes)


def unpack(data: bytes) -> Header:
    """Read what `pack` wrote. Raises BadFileError: foreign, version, corrupt or truncated."""
    header_bytes = header_size(data)
    if len(data) < header_bytes:
        raise BadFileError("truncated", "it ends within its header")
    _, version, _, text_bytes, num_layers, recorded = _PREFIX.unpack_from(data)
    without = bytearray(data[:header_bytes])
    without[_CHECKSUM_AT : _PREFIX.size] = bytes(4)
    if checksum(without) != recorded:
        raise BadFileError("corrupt", "its header does not have the checksum it should")
    if version != VERSION:
        raise BadFileError("version", f"it has format {version}, and this version of lwkv reads {VERSION}")
    header = _parse(data[_PREFIX.size : header_bytes], text_bytes, num_layers)
    if header is None or pack(header, header.form.header_bytes) != data[:header_bytes]:
        raise BadFileError("corrupt", "its header does not say what the header of a chunk says")
    return header


def _parse(data: bytes, text_bytes: int, num_layers: int) -> Header | None:
    """The header in `data`, which has the right checksum and may be anything; None for something else."""
    table = data[text_bytes : text_bytes + num_layers * _ENTRY.size]
    try:
        text = json.loads(data[:text_bytes])
    except (ValueError, RecursionError):
        return None
    if not isinstance(text, dict) or len(table) != num_layers * _ENTRY.size or not num_layers:
        return None
    key, page_format = text.get("key"), text.get("page_format")
    if not (isinstance(key, str) and is_key(key) and isinstance(page_format, str) and page_format.isascii()):
        return None
    layers = tuple(map(LayerEntry._make, _ENTRY.iter_unpack(table)))
    header = Header(key, page_format, layers)
    as_written = header.form.header(key, [each.checksum for each in layers])
    return header if header == as_written and header.form.page_bytes else None


def _text(key: str, page_format: str) -> bytes:
    return json.dumps({"key": key, "page_format": page_format}).encode()
