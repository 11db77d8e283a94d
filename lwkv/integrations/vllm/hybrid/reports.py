"""What every worker's half reports to the scheduler's half, once a step, for models with several groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class HybridInfo:
    """What the scheduler must know of a rank to name its chunks.

    Attributes:
        chain: what the hashes of all chunks begin with; the same on all ranks.
        chunk_size: tokens.
    """

    rank: int
    chain: str
    chunk_size: int


@dataclass(frozen=True, slots=True)
class Change:
    """Chunks of a kind that came to host memory, or went."""

    kind: int
    is_kept: bool
    hashes: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class HybridReport:
    """How a step was for one rank.

    Attributes:
        changes: in the order in which they happened.
        pinned: by the number of an order to pin, whether all of its chunks are pinned now.
        failed: requests whose loads, apart from a step, have failed; they are computed.
    """

    info: HybridInfo
    changes: Sequence[Change] = field(default=())
    pinned: Mapping[int, bool] = field(default_factory=dict)
    failed: Sequence[str] = field(default=())


@dataclass(frozen=True, slots=True)
class HybridReports:
    """The reports of one step from one or more ranks."""

    reports: tuple[HybridReport, ...]

    def aggregate(self, other: HybridReports) -> HybridReports:
        """Both together; vLLM calls this for the ranks of a step."""
        return HybridReports(self.reports + other.reports)
