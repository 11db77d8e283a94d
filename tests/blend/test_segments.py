"""Prompts are cut at a separator's token ids, whatever the tokenizer merges."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import tokenizers
from demo_model import needs_smollm2
from hypothesis import given
from hypothesis import strategies as st

from lwkv.blend import Separator
from lwkv.errors import ConfigError
from lwkv.reference import GGUFFile, find_smollm2, tokenizer_from_gguf

Encode = Callable[[str], Sequence[int]]


def characters(text: str) -> list[int]:
    """One id a character, ten more than its code."""
    return [10 + ord(character) for character in text]


def words(text: str) -> list[int]:
    """Blanks stand at the beginning of words, as byte-level BPE has them."""
    pre = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return [hash_of(word) for word, _ in pre.pre_tokenize_str(text)]


def hash_of(word: str) -> int:
    return 1000 + sum((i + 1) * ord(character) for i, character in enumerate(word))


def with_ends(encode: Encode) -> Encode:
    return lambda text: [1, *encode(text), 2]


def texts(encode: Encode, found: Separator, parts: Sequence[str], separator: str) -> None:
    ids = encode(separator.join(parts))
    cut = [ids[a:b] for a, b in found.split(ids)]
    assert len(cut) == len(parts)
    assert found.segments(ids) == found.split(ids)[:-1]


@pytest.mark.parametrize("encode", [characters, words, with_ends(characters), with_ends(words)])
@pytest.mark.parametrize("text", [" # # ", "\n\n===\n\n", " ## "])
def test_texts_put_together_are_cut_where_they_were_joined(encode: Encode, text: str) -> None:
    found = Separator(encode, text)
    texts(encode, found, ["You are kind.", "First document", "second, 3 words", "Why?"], text)


def test_parts_tokenized_one_by_one_are_cut_where_they_were_joined() -> None:
    found = Separator(words, " # # ")
    parts = [words(text) for text in ("one two", "three", "four five six")]
    ids = found.join(parts)
    assert [ids[a:b] for a, b in found.split(ids)] == parts
    whole = [*parts[0], *words(" # # "), *parts[1]]
    assert [whole[a:b] for a, b in found.split(whole)] == parts[:2]


@given(
    parts=st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=5),
    run=st.sampled_from([(7,), (7, 8), (7, 7)]),
)
def test_any_ids_between_separators_come_back(parts: list[list[int]], run: tuple[int, ...]) -> None:
    found = Separator(characters, "".join(chr(97 + number) for number in run))
    separator = [10 + 97 + number for number in run]
    ids = [*parts[0]]
    for part in parts[1:]:
        ids += [*separator, *part]
    assert [ids[a:b] for a, b in found.split(ids)] == [part for part in parts if part]


def test_a_prompt_without_separator_is_one_part_and_nothing_to_reuse() -> None:
    found = Separator(words, " # # ")
    ids = words("a prompt without any")
    assert found.split(ids) == [(0, len(ids))]
    assert found.segments(ids) == []
    assert found.split([]) == []


def test_a_separator_that_is_merged_with_its_neighbours_is_refused() -> None:
    def merging(text: str) -> list[int]:
        return [hash_of(word) for word in text.split()]

    with pytest.raises(ConfigError, match=r"blend_special_str '##' does not stay whole beside other text"):
        Separator(merging, "##")


@needs_smollm2
@pytest.mark.parametrize("text", [" # # ", "<|im_end|>"])
def test_smollm2_keeps_separators_whole(text: str) -> None:
    path = find_smollm2()
    assert path is not None
    encode = tokenizer_from_gguf(GGUFFile(path)).encode
    parts = ["You are a helpful AI assistant.\n", "The code is 123", "It ends\n\n", "(really)", "What is it?"]
    texts(encode, Separator(encode, text), parts, text)
