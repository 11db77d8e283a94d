from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lwkv.storage.disk import checksum


@pytest.fixture(autouse=True)
def _choose_anew() -> Iterator[None]:
    checksum._fastest.cache_clear()
    yield
    checksum._fastest.cache_clear()


@given(data=st.binary(max_size=300))
def test_every_package_gives_the_same_number(data: bytes) -> None:
    assert checksum.checksum(data) == checksum.checksum(memoryview(data)) == zlib.crc32(data)


def test_without_a_faster_package_the_standard_library_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in checksum._FASTER.values():
        monkeypatch.setitem(sys.modules, module, None)
    assert checksum.checksum_by() == "zlib"
    assert checksum.checksum(b"page") == zlib.crc32(b"page")


def test_a_faster_package_is_used_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    monkeypatch.setitem(sys.modules, "zlib_ng.zlib_ng", zlib)
    assert checksum.checksum_by() == "zlib-ng"
