"""What a kind must have, and what it stores."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kinds.kind_strategies import kinds, models, tokens_looked_at

from lwkv.errors import ConfigError
from lwkv.kinds import Kind


def stored_bytes(kind: Kind, chunk_start: int, chunk_end: int) -> int:
    """What is kept of a chunk, in all layers."""
    tokens = chunk_end - kind.first_stored(chunk_start, chunk_end)
    return tokens // kind.block_size * kind.block_bytes * kind.num_layers


def test_full_attention_needs_all_behind_what_the_engine_has() -> None:
    kind = Kind("full", 4, 2, 8)
    assert kind.first_needed(40) == 0
    assert kind.first_needed(40, 12) == 12
    assert kind.first_stored(8, 16) == 8


def test_a_window_below_a_chunk_keeps_the_chunks_last_blocks_alone() -> None:
    kind = Kind("window", 16, 3, 100, span=128)
    assert kind.first_needed(512) == 512 - 128
    assert kind.first_stored(256, 512) == 512 - 128  # ceil(127 / 16) = 8 blocks
    assert stored_bytes(kind, 256, 512) == 8 * 100 * 3


def test_a_window_above_a_chunk_keeps_whole_chunks() -> None:
    kind = Kind("window", 16, 3, 100, span=1024)
    assert kind.first_stored(256, 512) == 256
    assert kind.first_needed(2048) == 1024
    assert kind.first_needed(2048, 1536) == 1536


def test_a_window_of_one_token_needs_nothing() -> None:
    kind = Kind("window", 4, 1, 8, span=1)
    assert kind.first_needed(16) == 16 == kind.first_stored(8, 16)
    assert stored_bytes(kind, 8, 16) == 0


def test_a_local_chunk_needs_nothing_where_it_begins() -> None:
    kind = Kind("local", 4, 1, 8, span=32)
    assert kind.first_needed(64) == 64
    assert kind.first_needed(56) == 32
    assert kind.first_needed(56, 40) == 40
    assert kind.first_stored(56, 64) == 64


def test_a_state_needs_its_one_block_whatever_the_engine_has() -> None:
    kind = Kind("state", 528, 36, 1000)
    assert kind.first_needed(1056) == 528 == kind.first_needed(1056, 1000)
    assert kind.first_stored(0, 1056) == 528
    assert stored_bytes(kind, 0, 1056) == 36_000


@given(models(), st.integers(1, 20), st.integers(0, 20))
def test_what_is_needed_is_what_is_looked_at_in_whole_blocks(model, number, local_chunks) -> None:
    for kind in model[0]:
        if kind.form == "state":
            continue
        boundary = number * model[1]
        local = min(local_chunks * model[1], boundary)
        looked_at = tokens_looked_at(kind, boundary, local)
        first = min(looked_at, default=boundary)
        assert kind.first_needed(boundary, local) == first // kind.block_size * kind.block_size


@given(models(), st.integers(1, 12))
def test_a_chunk_stores_what_some_boundary_needs_and_no_block_more(model, number) -> None:
    """The least that serves all boundaries: every stored block is looked at from one of them."""
    some, chunk_size = model
    end = number * chunk_size
    for kind in some:
        stored = set(range(kind.first_stored(end - chunk_size, end), end))
        if kind.form == "state":
            assert len(stored) == kind.block_size
            continue
        later = range(end, end + kind.span + chunk_size, chunk_size)
        needed = set().union(*(tokens_looked_at(kind, boundary, 0) for boundary in later))
        needed &= set(range(end - chunk_size, end))
        assert needed <= stored
        blocks = {token // kind.block_size for token in needed}
        assert {token // kind.block_size for token in stored} == blocks


@given(kinds(), kinds())
def test_kinds_that_differ_have_different_keys(one, other) -> None:
    assert (one == other) == (one.key_part == other.key_part)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("windows", 16, 1, 8), r"form: got 'windows'; allowed: one of full, window, local, state"),
        (("full", 0, 1, 8), r"block_size: got 0; allowed: a whole number of 1 or more"),
        (("window", 16, 1, 8), r"span: got 0; allowed: a whole number of 1 or more"),
        (("full", 16, 1, 8, (), 5), r"span: got 5; allowed: 0 for 'full'"),
    ],
)
def test_wrong_numbers_are_refused(arguments, text) -> None:
    with pytest.raises(ConfigError, match=text):
        Kind(*arguments)
