"""What looking up is made of, for whoever looks up what is no prefix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lwkv.integrations.vllm.scheduler.lookup.index import ChunkIndex
from lwkv.integrations.vllm.scheduler.lookup.look_ups import LookUps
from lwkv.integrations.vllm.scheduler.lookup.waiting_loads import WaitingLoads
from lwkv.telemetry.counters import Counters


@dataclass(frozen=True, slots=True)
class LookUpParts:
    """The scheduler's own.

    Attributes:
        waiting: the loads that requests wait for.
        look_ups: into lower tiers.
        clock: seconds.
        fetches: whether requests wait for what is in lower tiers.
    """

    index: ChunkIndex
    waiting: WaitingLoads
    look_ups: LookUps
    counters: Counters
    clock: Callable[[], float]
    fetches: bool
