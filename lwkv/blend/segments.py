"""Where a prompt is cut into segments: at the separator's token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lwkv.blend.request import Segment
from lwkv.errors import ConfigError
from lwkv.keys import TokenIds, as_token_ids
from lwkv.platforms.protocol import Int64s

Encode = Callable[[str], Sequence[int]]

# What a separator may stand between: tokenizers merge letters, digits, marks and line ends differently.
_BEFORE = ("word", "3", "end.", "line\n", '"', ")")
_AFTER = ("word", "Word", "3", "\nline", '"', "(")


class Separator:
    """A separator text as the runs of token ids that it can become.

    A tokenizer may take the blanks at its ends into the words beside it, so it is known with and without
    them. Of several that begin at one token the longest counts.

    Args:
        encode: turns text into token ids; ids that it adds to every text (BOS, EOS) are left out.
        text: `blend_special_str`.

    Raises:
        ConfigError: beside some text the tokenizer merges the separator with it, so that it is not found.
    """

    def __init__(self, encode: Encode, text: str) -> None:
        self.text = text
        self._encode = encode
        self._head, self._tail = added_ids(encode)
        # Without the blank at its end, which tokenizers put at the beginning of the next word.
        self._written = self._plain(text.rstrip())
        forms = {tuple(self._plain(form)) for form in _forms(text)}
        self.runs = sorted((np.array(form, np.int64) for form in forms if form), key=len, reverse=True)
        self._require_whole()

    def split(self, tokens: TokenIds) -> list[Segment]:
        """The parts between separators, in order, empty ones left out."""
        ids = as_token_ids(tokens)
        starts, parts = 0, []
        for start, end in [*self._find(ids), (len(ids), len(ids))]:
            if start > starts:
                parts.append(Segment(starts, start))
            starts = end
        return parts

    def join(self, parts: Sequence[Sequence[int]]) -> list[int]:
        """Put parts, tokenized one by one, together with separators between them."""
        joined = list(parts[0])
        for part in parts[1:]:
            joined += [*self._written, *part]
        return joined

    def segments(self, tokens: TokenIds) -> list[Segment]:
        """The parts that may be reused: all but the last one, which is the question."""
        return self.split(tokens)[:-1]

    def _find(self, ids: Int64s) -> Iterator[tuple[int, int]]:
        """Start and end of every separator, from left to right, none of which overlap."""
        ends: dict[int, int] = {}
        for run in reversed(self.runs):
            ends |= {start: start + len(run) for start in _matches(ids, run)}
        reached = 0
        for start in sorted(ends):
            if start >= reached:
                reached = ends[start]
                yield start, reached

    def _plain(self, text: str) -> list[int]:
        ids = list(self._encode(text))
        return ids[self._head : len(ids) - self._tail]

    def _require_whole(self) -> None:
        for before in _BEFORE:
            for after in _AFTER:
                ids = np.array(self._plain(before + self.text + after), np.int64)
                if len(list(self._find(ids))) != 1:
                    raise ConfigError(
                        f"blend_special_str {self.text!r} does not stay whole beside other text: between "
                        f"{before!r} and {after!r} the tokenizer makes {ids.tolist()} of it; choose one that "
                        "it keeps, such as ' # # ' or a special token"
                    )


def added_ids(encode: Encode) -> tuple[int, int]:
    """How many ids `encode` puts before and behind every text."""
    one, two = list(encode("a")), list(encode("a a a"))
    head = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), len(one))
    bare = list(encode(""))
    head = min(head, len(bare))
    while head and one[:head] != bare[:head]:
        head -= 1
    return head, len(bare) - head


def _forms(text: str) -> list[str]:
    return [text, text.rstrip(), text.lstrip(), text.strip()]


def _matches(ids: Int64s, run: Int64s) -> list[int]:
    if len(ids) < len(run):
        return []
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(run))
    found: list[int] = np.flatnonzero((windows == run).all(axis=1)).tolist()
    return found
