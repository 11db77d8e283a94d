"""One prompt to be blended: its tokens, its slots, and which parts of it may come from anywhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from lwkv.errors import RequestError
from lwkv.platforms.protocol import Int64s
from lwkv.request import Request, check_loads
from lwkv.transfer import NO_SLOT, Chunking

# Where no chunks are asked for.
UNCUT = Chunking(sys.maxsize, partial=False)


class Segment(NamedTuple):
    """Tokens [start, end) of a prompt, cached by their content alone."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class BlendRequest:
    """A prompt whose segments are reused wherever they stand.

    Args:
        tokens: token ids, (tokens,): list, tuple, numpy array or tensor.
        slot_mapping: each token's slot in the engine's cache, whole numbers (tokens,), on the host.
        segments: ascending, apart from each other. What lies in none of them is always computed.
        num_local: leading tokens whose KV, an ordinary prefill's, is in their slots already.
        salts: what else decides the bytes, as in `lwkv.Request`.
    """

    tokens: Any
    slot_mapping: Any
    segments: Sequence[Segment | tuple[int, int]] = ()
    num_local: int = 0
    salts: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class CheckedBlend:
    """A request whose parts fit each other; `ids` and `slots` are int64 (tokens,)."""

    ids: Int64s
    slots: Int64s
    segments: tuple[Segment, ...]
    num_local: int
    salts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ids)


def check_blend(request: BlendRequest, num_slots: int) -> CheckedBlend:
    """Bring a request into the form that is worked with.

    Raises:
        RequestError: no token; tokens that are no ids; slots of another number or kind, out of range, or
            given twice; segments as `check_segments`; `num_local` that leaves no token.
    """
    whole = Request(request.tokens, request.slot_mapping, salts=request.salts)
    (checked,) = check_loads([whole], num_slots, UNCUT)
    if not len(checked.ids):
        raise RequestError("a prompt without a token cannot be computed; give one token at least")
    if int(checked.slots.min()) == NO_SLOT:
        raise RequestError(
            f"slot_mapping has {NO_SLOT}; every token of a prompt that is blended needs a slot"
        )
    if not 0 <= request.num_local < len(checked.ids):
        raise RequestError(f"num_local is {request.num_local}; allowed: 0 to {len(checked.ids) - 1}")
    segments = check_segments(request.segments, len(checked.ids))
    return CheckedBlend(checked.ids, checked.slots, segments, request.num_local, checked.salts)


def check_segments(segments: Any, num_tokens: int) -> tuple[Segment, ...]:
    """Bring the segments of a prompt of `num_tokens` into one form.

    Raises:
        RequestError: no list or tuple of pairs of whole numbers; segments that are empty, out of range,
            out of order or overlap.
    """
    if not isinstance(segments, list | tuple):
        raise RequestError(f"segments are {segments!r:.200}; give a list of pairs (start, end)")
    checked = tuple(_segment(given) for given in segments)
    for segment in checked:
        if not 0 <= segment.start < segment.end <= num_tokens:
            raise RequestError(
                f"{segment} is no part of {num_tokens} tokens: 0 <= start < end <= {num_tokens}"
            )
    for before, after in pairwise(checked):
        if before.end > after.start:
            raise RequestError(f"{before} and {after} overlap or are out of order; give them ascending")
    return checked


def _segment(given: Any) -> Segment:
    ends = given if isinstance(given, list | tuple) else ()
    whole = [end for end in ends if isinstance(end, int | np.integer) and not isinstance(end, bool)]
    if len(whole) != 2 or len(ends) != 2:
        raise RequestError(f"segment {given!r:.200} is no pair of whole numbers (start, end)")
    return Segment(int(whole[0]), int(whole[1]))
