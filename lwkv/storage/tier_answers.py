"""What a tier answers, which may be somebody else's: whether it is an answer, and what it means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lwkv.keys import ChunkKey
from lwkv.storage.tier import Missing, Status, Tier

FILLED = 0
"""The outcome of a page that was moved; others are those of `Missing`."""


def ask_whether_there(tier: Tier, keys: Sequence[ChunkKey], deadline_s: float) -> list[bool]:
    """What a tier's `contains` says of each key. Raises TypeError, ValueError for what is no answer."""
    answer = tier.contains(keys, deadline_s)
    check_length("contains", answer, len(keys))
    _check_flags(answer)
    return [bool(there) for there in answer]


def outcome_of(status: object) -> int:
    """FILLED, or why a page was not moved. What is no Status counts as an error."""
    if status is Status.OK:
        return FILLED
    return Missing.MISS if status is Status.MISS else Missing.ERROR


def check_length(call: str, answers: Sequence[object], expected: int) -> None:
    """Raise TypeError or ValueError for anything but `expected` answers of a call."""
    if not isinstance(answers, Sequence):
        raise TypeError(f"{call} returned {answers!r}; a tier returns a list with one answer for each key")
    if len(answers) != expected:
        raise ValueError(f"{call} of {expected} keys returned {len(answers)} answers")


def _check_flags(answers: Sequence[object]) -> None:
    for answer in answers:
        if not isinstance(answer, (bool, int, np.bool_)):
            raise TypeError(f"contains returned {answer!r} for a key; a tier returns True or False for each")


def note_on(statuses: Sequence[object]) -> str:
    """What to add to the log where some of a tier's answers are no Status; they count as failures."""
    odd = [status for status in statuses if not isinstance(status, Status)]
    return f" ({odd[0]!r} for {len(odd)}: a tier returns a lwkv.storage.Status for each)" if odd else ""
