"""The chunk size that a model gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lwkv.errors import ConfigError
from lwkv.kinds import choose_chunk_size


@pytest.mark.parametrize(
    ("configured", "blocks", "tokens"),
    [
        (256, [16, 16], 256),
        (256, [528], 528),
        (256, [784, 16], 784),
        (1024, [528], 1056),
        (1024, [784], 784),
        (24, [16], 16),  # as near as 32, and smaller
    ],
)
def test_the_nearest_multiple_of_all_blocks_is_chosen(configured, blocks, tokens) -> None:
    assert choose_chunk_size(configured, blocks).tokens == tokens


@given(st.integers(1, 300), st.lists(st.integers(1, 12), min_size=1, max_size=3), st.integers(1, 12))
def test_no_other_multiple_is_nearer(configured, blocks, alignment) -> None:
    chosen = choose_chunk_size(configured, blocks, alignment)
    assert all(chosen.tokens % size == 0 for size in [*blocks, alignment])
    others = range(chosen.unit, configured + 2 * chosen.unit, chosen.unit)
    assert abs(chosen.tokens - configured) == min(abs(other - configured) for other in others)


def test_the_words_say_what_was_configured_and_why_it_is_not_that() -> None:
    assert choose_chunk_size(256, [528]).words() == (
        "chunks have 528 tokens instead of the configured 256: this model's blocks need a multiple of 528"
    )
    assert choose_chunk_size(256, [16]).words() == "chunks have 256 tokens, as configured"


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="chunk_size: got 0 tokens; allowed: 1 or more"):
        choose_chunk_size(0, [16])
