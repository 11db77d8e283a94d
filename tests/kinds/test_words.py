"""What is said of a kind is what it keeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from kinds.kind_strategies import kinds

from lwkv.kinds import Kind
from lwkv.kinds.words import boundary_bytes, describe_kind, size, token_bytes


@given(kinds())
def test_the_bytes_of_a_boundary_are_the_most_that_any_boundary_needs(kind: Kind) -> None:
    boundaries = range(kind.block_size, 250 * kind.block_size, kind.block_size)
    needed = max((boundary - kind.first_needed(boundary)) // kind.block_size for boundary in boundaries)
    wanted = 0 if kind.form == "full" else needed * kind.num_layers * kind.block_bytes
    assert boundary_bytes(kind) == wanted


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            Kind("full", 16, 8, 65536),
            "8 layers, blocks of 16 tokens with 64 KiB a layer, 32 KiB a token, of all tokens",
        ),
        (
            Kind("window", 16, 1, 24576, span=1024),
            "1 layer, blocks of 16 tokens with 24 KiB a layer, 1.5 KiB a token, at most 1.5 MiB where a "
            "prompt can go on",
        ),
        (Kind("state", 528, 36, 1 << 20), "36 layers, 36 MiB a state, one for at most every 528 tokens"),
    ],
)
def test_a_kind_in_words(kind: Kind, words: str) -> None:
    assert describe_kind(kind) == words


def test_a_state_has_no_bytes_of_a_token() -> None:
    assert token_bytes(Kind("state", 8, 2, 100)) == 0


@pytest.mark.parametrize(
    ("num_bytes", "shown"), [(100, "100 bytes"), (1536, "1.5 KiB"), (3 << 30, "3 GiB"), (1 << 20, "1 MiB")]
)
def test_a_size_in_words(num_bytes: int, shown: str) -> None:
    assert size(num_bytes) == shown
