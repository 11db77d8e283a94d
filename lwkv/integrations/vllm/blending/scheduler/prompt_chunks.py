"""The chunks of a prompt's segments, and what was found of them in lower tiers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from lwkv.blend.request import Segment
from lwkv.integrations.vllm.scheduler.lookup.index import RankKeys


class KeyedSegment(NamedTuple):
    """A part of a prompt, and for every rank the keys of its chunks."""

    part: Segment
    keys: RankKeys

    @property
    def name(self) -> bytes:
        """Stands for all tokens of it."""
        return self.keys[0][-1].hash


@dataclass(slots=True, eq=False)
class LookUp:
    """One that is under way: of which segments, and after how many changes of the index it began."""

    keys: Sequence[RankKeys]
    changes: int
    answer: Future[list[Sequence[str | None]]]


@dataclass(slots=True, eq=False)
class PromptChunks:
    """The chunks of one prompt's segments. By the hashes of the first rank's keys they have one name.

    Attributes:
        below: chunks that were not in host memory, and a lower tier has, when they were looked up last.
        look_up: the one that is under way; None for none.
        found_at: when the last one ended; None before that.
        found_after: changes of the index that it has seen.
    """

    segments: Sequence[KeyedSegment]
    below: frozenset[bytes] = frozenset()
    look_up: LookUp | None = None
    found_at: float | None = None
    found_after: int = 0

    def hashes(self) -> frozenset[bytes]:
        """Of all ranks."""
        return frozenset(key.hash for segment in self.segments for own in segment.keys for key in own)


def segments_of(request_id: str) -> Hashable:
    """The name under which `WaitingLoads` has what is fetched of a request's segments."""
    return "segments", request_id
