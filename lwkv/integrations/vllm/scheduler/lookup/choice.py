"""How many of the chunks found are loaded, given how long the prompt takes with as many as that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lwkv.integrations.vllm.scheduler.lookup.measured.prefill_times import Floats
from lwkv.integrations.vllm.scheduler.lookup.patience import Patience
from lwkv.storage.tier import HOST

CLEARLY, MUCH = 0.96, 0.8
"""A request waits for a lower tier where that takes less than this share of the time without. All that is
found is loaded, where that is faster than computing all, unless something else takes much less: what is
computed holds up other requests."""


class Choice(NamedTuple):
    """How many of the chunks found are to be loaded, and in how many seconds the prompt is then computed.

    Attributes:
        all_s, none_s: the same if all of them were loaded, or none.
        patience: how long the request may wait for them; None where nothing is known of prefills.
        measures: whether the tier of the first chunk that is left out should be measured again.
    """

    num_chunks: int
    seconds: float
    all_s: float
    none_s: float
    patience: Patience | None = None
    measures: bool = False

    @property
    def estimates(self) -> str:
        """The seconds, for the log."""
        if self.patience is None:
            return "how long computing takes is not known yet"
        so, if_all, if_none = 1e3 * self.seconds, 1e3 * self.all_s, 1e3 * self.none_s
        return (
            f"the prompt takes about {so:.1f} ms so, {if_all:.1f} ms if all that is cached were loaded, and "
            f"{if_none:.1f} ms if nothing"
        )


def num_in_host(tiers: Sequence[str]) -> int:
    """How many leading chunks are in host memory."""
    return next((i for i, tier in enumerate(tiers) if tier != HOST), len(tiers))


def best_of(times: Floats, in_host: int, waits: bool) -> int:
    """How many chunks to load.

    Args:
        times: seconds that the prompt takes with none of them, with the first, and so on.
        in_host: how many leading chunks are in host memory.
        waits: whether the request has to wait for the others.
    """
    if not waits or in_host == len(times) - 1:
        return _all_or_best(times, float("inf"))
    at_once = times[: in_host + 1]
    limit = CLEARLY * float(at_once.min())
    return _all_or_best(times, limit) if times.min() <= limit else _all_or_best(at_once, float("inf"))


def _all_or_best(times: Floats, limit: float) -> int:
    best = int(times.argmin())
    loads_all = times[-1] <= min(times[0], limit) and times[best] > MUCH * times[-1]
    return len(times) - 1 if loads_all else best
