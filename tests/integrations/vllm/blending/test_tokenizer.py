"""What blending needs of a tokenizer."""

from __future__ import annotations

import pytest

from lwkv.blend.shared_prefix import DEFAULT_TEXT
from lwkv.errors import ConfigError
from lwkv.integrations.vllm.blending.tokenizer import find_separator, prefix_ids
from lwkv.integrations.vllm.settings import read_settings


def encode(text: str) -> list[int]:
    return [1, *map(ord, text)]


def test_a_text_keeps_what_the_tokenizer_puts_in_front() -> None:
    assert prefix_ids(read_settings({"blend_shared_prefix": "ab"}), encode) == (1, 97, 98)
    assert prefix_ids(read_settings({}), encode) == tuple(encode(DEFAULT_TEXT))


def test_token_ids_are_taken_as_they_are() -> None:
    assert prefix_ids(read_settings({"blend_shared_prefix": [5, 6]}), None) == (5, 6)
    assert prefix_ids(read_settings({"blend_shared_prefix": []}), encode) == ()


@pytest.mark.parametrize("given", [None, "a text"])
def test_a_text_without_a_tokenizer_is_refused(given: str | None) -> None:
    with pytest.raises(ConfigError, match="without a tokenizer; give a list of token ids"):
        prefix_ids(read_settings({"blend_shared_prefix": given}), None)


def test_the_separator_is_that_of_the_settings() -> None:
    assert find_separator(read_settings({}), None) is None
    found = find_separator(read_settings({"blend_special_str": "##"}), encode)
    assert found is not None
    assert found.segments(encode("one##two##three")) == [(0, 4), (6, 9)]
