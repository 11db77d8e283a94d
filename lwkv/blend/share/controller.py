"""How much to compute again: as much as hides behind the loading, by speeds measured in earlier passes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lwkv.blend.share.pace import PaceFound


class Reason(str, Enum):
    """Why a share was chosen."""

    FIXED = "fixed"
    UNMEASURED = "unmeasured"  # no pass has been timed so far: the configured minimum
    MINIMUM = "minimum"  # loading is too fast to hide more than the configured minimum
    HIDDEN = "hidden"  # more than the minimum hides behind the loading
    PREFILL = "prefill"  # to compute everything is cheaper than to load


@dataclass(frozen=True, slots=True)
class Decision:
    """The share of the reused tokens to compute again, and why."""

    share: float
    reason: Reason


@dataclass(frozen=True, slots=True)
class BatchWork:
    """What a batch has to do: tokens that can be reused, tokens that are computed in any case, layers.

    In `full_layers` all tokens are computed, whatever the share. `loaded` are the tokens that come from the
    tiers, those of a prefix included.
    """

    reused: int
    loaded: int
    always: int
    num_layers: int
    full_layers: int

    def rows(self, share: float) -> float:
        """Rows computed, summed over the layers."""
        thin = self.num_layers - self.full_layers
        return (self.reused + self.always) * self.full_layers + (share * self.reused + self.always) * thin

    @property
    def loads(self) -> int:
        """Rows loaded, summed over the layers."""
        return self.loaded * self.num_layers


# A pass that waited for less than this part of its time was not held up by its loads.
NOTICED = 0.05
# How much of a new measurement enters, and how fast a load that holds nothing up is taken to be faster.
FRESH = 0.5
FASTER = 0.9
# However slow a load was, it counts for so many times a full prefill, and is tried again after two of these;
# each time that it is slow again, for so many times more, up to the second number.
SLOWER, SLOWEST = 1.2, 4.0


class LoadingController:
    """Chooses shares so that computing takes as long as loading, and never less than `minimum`.

    Speeds are those of the passes before, in seconds a row and layer. Where loads hold a pass up, the pace of
    the pass is theirs; where they do not, they are taken to be a little faster than before, so that a share
    that was raised comes down again when the tiers become faster.
    """

    def __init__(self, minimum: float) -> None:
        self.minimum = minimum
        self.compute_s: float | None = None
        self.load_s: float | None = None
        self._most = 1.0

    def decide(self, work: BatchWork) -> Decision:
        """Choose for a batch."""
        if self.compute_s is None or self.load_s is None or not work.reused:
            return Decision(self.minimum, Reason.UNMEASURED)
        load = self.load_s * work.loads
        full = self.compute_s * work.rows(1.0)
        if max(load, self.compute_s * work.rows(self.minimum)) >= full:
            self.load_s = FASTER * min(load, self._most * full) / work.loads  # so that it is tried again
            return Decision(1.0, Reason.PREFILL)
        spare = load / self.compute_s - work.rows(0.0)
        hidden = spare / (work.reused * max(work.num_layers - work.full_layers, 1))
        if hidden <= self.minimum:
            return Decision(self.minimum, Reason.MINIMUM)
        return Decision(min(hidden, 1.0), Reason.HIDDEN)

    def learn(self, work: BatchWork, row_layers: int, pace: PaceFound) -> None:
        """Take over what a pass that computed `row_layers` rows and loaded all of `work` took."""
        if pace.computed <= 0:
            return  # a clock too coarse for so short a pass
        self.compute_s = _mixed(self.compute_s, pace.computed / row_layers)
        if not work.loads:
            return
        whole = pace.computed + pace.waited
        held_up = pace.waited - pace.waited_first > NOTICED * whole
        if held_up:
            self.load_s = _mixed(self.load_s, whole / work.loads)
            slow = whole > self.compute_s * work.rows(1.0)
            self._most = min(self._most * SLOWER, SLOWEST) if slow else 1.0
        else:
            self._most = 1.0
            known = whole if self.load_s is None else self.load_s * work.loads
            self.load_s = FASTER * min(known, whole) / work.loads


def _mixed(known: float | None, new: float) -> float:
    return new if known is None else (1 - FRESH) * known + FRESH * new
