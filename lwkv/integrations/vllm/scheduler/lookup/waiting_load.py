"""What one request waits for, of all that lower tiers are to bring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lwkv.integrations.vllm.orders import Fetch
from lwkv.integrations.vllm.scheduler.lookup.patience import Wait


@dataclass(slots=True, eq=False)
class WaitingLoad:
    """What one request waits for.

    Attributes:
        fetches: their numbers name them in orders and reports; no number is used twice.
        num_chunks: that are pinned in the host memory of each rank for it.
        room: that these take of the limit for all loads.
        since: when it began to wait.
        is_ordered: whether the workers have heard of it.
        is_over: whether the request does not wait any more.
        is_noted: whether it was given out that its wait was cut short.
        is_held: whether the workers keep its chunks.
        measures: whether no request waits for it: it shows how fast a tier is.
        wait: says when the request is better off with what is there; None where it waits for all,
            and once all has come.
        ended: the ranks and numbers of fetches that have ended.
    """

    fetches: Sequence[Fetch]
    num_chunks: int
    room: int
    since: float
    is_ordered: bool = False
    is_over: bool = False
    is_noted: bool = False
    is_held: bool = False
    measures: bool = False
    wait: Wait | None = None
    ended: set[tuple[int, int]] = field(default_factory=set)
