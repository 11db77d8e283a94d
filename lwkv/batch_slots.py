"""Whether slots can be those of a batch: in range, and none given to two tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lwkv.errors import RequestError
from lwkv.platforms.protocol import Int64s
from lwkv.transfer import NO_SLOT, CheckedRequest, joined


def check_batch_slots(requests: Sequence[CheckedRequest], num_slots: int) -> None:
    """Refuse slots that cannot be those of a batch.

    Raises:
        RequestError: a slot out of range; one given to two tokens of a request, or of two requests, unless
            it is the same token after the same prefix, under the same salts.
    """
    requests = [request for request in requests if request.device_slots is None]
    if not requests:
        return
    slots = joined([request.slots for request in requests])
    if _are_repeated(slots, num_slots):
        _refuse_contradictions(requests, slots)


def _refuse_contradictions(requests: Sequence[CheckedRequest], slots: Int64s) -> None:
    """Raise RequestError for a slot of two tokens, unless they are one: at the end of the same prefix.

    Only neighbours in the order of slots are compared: sharing a prefix is transitive.
    """
    lengths = [len(request.slots) for request in requests]
    owners = np.repeat(np.arange(len(requests)), lengths)
    places = joined([np.arange(length) for length in lengths])
    order = np.argsort(slots, kind="stable")
    before, after = order[:-1], order[1:]
    shared = (slots[before] == slots[after]) & (slots[after] != NO_SLOT)
    before, after = before[shared], after[shared]
    pairs, pair_of = np.unique(owners[before] * len(requests) + owners[after], return_inverse=True)
    owned = (divmod(pair, len(requests)) for pair in pairs.tolist())
    same = np.array([_common_prefix(requests[a], requests[b]) for a, b in owned])
    wrong = (places[before] != places[after]) | (places[before] >= same[pair_of.reshape(-1)])
    if wrong.any():
        inside = wrong & (owners[before] == owners[after])
        found = slots[before[(inside if inside.any() else wrong).argmax()]]
        raise RequestError(
            f"slot {found} is given to two tokens of a request; each needs its own"
            if inside.any()
            else f"slot {found} is given to two tokens: requests of a batch may share the slots of a prefix "
            "that is the same in both, and no others"
        )


def _common_prefix(one: CheckedRequest, other: CheckedRequest) -> int:
    if one.salts != other.salts:
        return 0
    length = min(len(one.ids), len(other.ids))
    differ = one.ids[:length] != other.ids[:length]
    return int(differ.argmax()) if differ.any() else length


def _are_repeated(slots: Int64s, num_slots: int) -> bool:
    """Whether any slot occurs twice. Raises RequestError for a slot out of range.

    Slots come in runs, a block or more: only the ends of these are looked at. Runs are apart if each begins
    after the one before has ended, firsts and lasts sorted by themselves.
    """
    if int(slots.min(initial=0)) < 0:
        slots = slots[slots != NO_SLOT]
    if not len(slots):
        return False
    steps = np.zeros(len(slots), np.int64)
    np.subtract(slots[1:], slots[:-1], out=steps[1:])
    starts = (steps != 1).nonzero()[0]
    # The slot before a run's first ends the run before; before the very first stands the very last.
    first, last = slots[starts], slots[starts - 1]
    first.sort()
    last.sort()
    for extreme in (int(first[0]), int(first[-1]), int(last[-1])):
        if not 0 <= extreme < num_slots:
            raise RequestError(
                f"slot {extreme} is out of range: slots are 0 to {num_slots - 1}, or {NO_SLOT} for none"
            )
    return bool((first[1:] <= last[:-1]).any())
