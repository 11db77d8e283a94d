"""Names of files: lwkv's own are known as what they are, and all others are left alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from storage.rig import key

from lwkv.storage.disk.names import (
    BAD_SUFFIX,
    CHUNK_SUFFIX,
    FileKind,
    draft_name,
    is_key,
    kind_of,
    probe_name,
)

TEXT = key(1).to_string()


def test_every_name_that_is_made_is_known_as_what_it_is() -> None:
    assert is_key(TEXT)
    made = [TEXT + CHUNK_SUFFIX, TEXT + BAD_SUFFIX, draft_name(TEXT), probe_name()]
    assert [kind_of(name) for name in made] == [FileKind.CHUNK, FileKind.BAD, FileKind.DRAFT, FileKind.PROBE]


def test_names_that_are_made_twice_differ() -> None:
    assert len({draft_name(TEXT) for _ in range(8)} | {probe_name() for _ in range(8)}) == 16


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".lwkv-lock",
        "notes.kv",
        TEXT,
        f"{TEXT}.kv~",
        f"{TEXT}.kv\n",
        f" {TEXT}.kv",
        f"{TEXT}.tmp-1",
        f"{TEXT}.tmp-1-0000000g",
        f"../{TEXT}.kv",
        f".{TEXT}.kv",
        f"{TEXT[:-1]}.kv",
        f"model.{'A' * 32}.kv",
        ".lwkv-probe-",
    ],
)
def test_a_name_that_lwkv_never_makes_is_somebody_elses(name: str) -> None:
    assert kind_of(name) is None


@given(st.text())
def test_no_key_leads_out_of_the_folder(text: str) -> None:
    for key_text in (text, f"{text}.{'0' * 32}"):
        assert not is_key(key_text) or ("/" not in key_text and not key_text.startswith("."))
