"""What every worker's half reports to the scheduler's half, once a step, for models with several groups."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lwkv.hybrid import KindPages
from lwkv.integrations.vllm.reports import RankInfo, RankReport


@dataclass(frozen=True, slots=True)
class HybridInfo:
    """What the scheduler must know of a rank to name its chunks.

    Attributes:
        chain: what the hashes of all chunks begin with; the same on all ranks.
        chunk_size: tokens.
        kinds: by number, how lower tiers have the chunks of a kind.
        page_bytes, page_format: of their pages.
        max_pages: that host memory has room for.
    """

    rank: int
    chain: str
    chunk_size: int
    kinds: Mapping[int, KindPages] = field(default_factory=dict)
    page_bytes: int = 1
    page_format: str = ""
    max_pages: int = sys.maxsize

    @property
    def usual_pages(self) -> int:
        """Pages of a usual chunk, for the speed of tiers: one of full attention if there is any."""
        full = [kind.num_pages for kind in self.kinds.values() if kind.is_full]
        return max(full or (kind.num_pages for kind in self.kinds.values()), default=1)


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
        step: of the orders that this answers, where they are timed.
        unread, read, fetched: as in RankReport.
    """

    info: HybridInfo
    changes: Sequence[Change] = field(default=())
    pinned: Mapping[int, bool] = field(default_factory=dict)
    failed: Sequence[str] = field(default=())
    step: int = 0
    unread: Mapping[str, float] | None = None
    read: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    fetched: Sequence[int] = field(default=())

    def of_lower_tiers(self) -> RankReport:
        """What it says of lower tiers, and of the time of a step, in chunks of the usual size."""
        info = RankInfo(self.info.rank, "", num_layers=self.info.usual_pages, page_bytes=self.info.page_bytes)
        return RankReport(info, self.step, unread=self.unread, read=self.read, fetched=self.fetched)


@dataclass(frozen=True, slots=True)
class HybridReports:
    """The reports of one step from one or more ranks."""

    reports: tuple[HybridReport, ...]

    def aggregate(self, other: HybridReports) -> HybridReports:
        """Both together; vLLM calls this for the ranks of a step."""
        return HybridReports(self.reports + other.reports)
