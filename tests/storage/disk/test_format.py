"""Whatever a file begins with, it is a header or a BadFileError."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from storage.disk_rig import FORM
from storage.rig import key

from lwkv.storage.disk.format import ALIGNMENT, BadFileError, pack, unpack

KEY = key(1).to_string()
RIGHT = {"key": KEY, "page_format": "canonical"}
ENTRY = struct.Struct("<QQI")


def with_checksum(
    text: bytes, table: bytes, num_layers: int, text_bytes: int | None = None, version: int = 1
) -> bytes:
    """A header with these parts and the right checksum."""
    told = len(text) if text_bytes is None else text_bytes
    size = max(ALIGNMENT, -(-(28 + len(text) + len(table)) // ALIGNMENT) * ALIGNMENT)
    prefix = struct.pack("<8sIIIII", b"LWKVDISK", version, size, told, num_layers, 0)
    data = bytearray((prefix + text + table).ljust(size, b"\0"))
    data[24:28] = zlib.crc32(data).to_bytes(4, "little")
    return bytes(data)


def table_of(num_layers: int) -> bytes:
    return b"".join(ENTRY.pack(*entry) for entry in FORM.header(KEY, [7] * num_layers).layers)


def test_what_was_packed_is_unpacked() -> None:
    header = FORM.header(KEY, [1, 2, 3])
    data = pack(header, FORM.header_bytes)
    assert unpack(data) == header
    assert data == with_checksum(json.dumps(RIGHT).encode(), data[28 + len(json.dumps(RIGHT)) :][:60], 3)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
# Any other text is a page format: with the key and the table it makes a right header.
no_formats = json_values.filter(lambda value: not (isinstance(value, str) and value.isascii()))
parts_of_right = st.fixed_dictionaries(
    {}, optional={"key": json_values | st.just(KEY), "page_format": no_formats, "more": json_values}
)
texts = st.binary(max_size=50) | (json_values | parts_of_right).map(lambda value: json.dumps(value).encode())


@given(text=texts, table=st.binary(max_size=70) | st.just(table_of(3)), num=st.integers(0, 2**32 - 1))
def test_anything_with_a_right_checksum_is_a_bad_file(text: bytes, table: bytes, num: int) -> None:
    for num_layers in (num, num % 5, 3):
        with pytest.raises(BadFileError) as bad:
            unpack(with_checksum(text, table, num_layers))
        assert bad.value.reason == "corrupt"


@given(data=st.binary(max_size=200), size=st.integers(0, 2**32 - 1))
def test_any_bytes_are_a_bad_file(data: bytes, size: int) -> None:
    for start in (data, b"LWKVDISK" + data, b"LWKVDISK" + struct.pack("<II", 1, size) + data):
        with pytest.raises(BadFileError):
            unpack(start)


ODD: dict[str, tuple[Any, bytes, int]] = {
    "an object without keys": ({}, table_of(3), 3),
    "a list": ([], table_of(3), 3),
    "a key that is a number": (RIGHT | {"key": 5}, table_of(3), 3),
    "a key that is a path": (RIGHT | {"key": "../../x"}, table_of(3), 3),
    "a format that is none": (RIGHT | {"page_format": None}, table_of(3), 3),
    "half a character": (RIGHT | {"page_format": "\ud800"}, table_of(3), 3),
    "no layers": (RIGHT, b"", 0),
    "more layers than entries": (RIGHT, table_of(3), 4000),
    "layers over each other": (RIGHT, ENTRY.pack(4096, 5, 7) * 3, 3),
    "layers of no bytes": (RIGHT, ENTRY.pack(4096, 0, 7), 1),
    "layers at the end of the world": (RIGHT, ENTRY.pack(2**64 - 1, 2**64 - 1, 7), 1),
}


@pytest.mark.parametrize("odd", ODD)
def test_a_header_that_says_something_else_is_corrupt(odd: str) -> None:
    value, table, num_layers = ODD[odd]
    with pytest.raises(BadFileError) as bad:
        unpack(with_checksum(json.dumps(value).encode(), table, num_layers))
    assert bad.value.reason == "corrupt"


@pytest.mark.parametrize("text", [b"\xff\xfe", b"{", b"[" * 100_000, b"1" * 5000, b""])
def test_text_that_is_no_json_is_corrupt(text: bytes) -> None:
    with pytest.raises(BadFileError) as bad:
        unpack(with_checksum(text, table_of(3), 3))
    assert bad.value.reason == "corrupt"


def test_a_text_longer_than_its_header_is_corrupt() -> None:
    with pytest.raises(BadFileError) as bad:
        unpack(with_checksum(b"{}", b"", 1, text_bytes=2**32 - 1))
    assert bad.value.reason == "corrupt"
