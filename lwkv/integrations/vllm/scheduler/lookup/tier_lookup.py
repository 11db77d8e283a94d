"""The tiers below host memory as the scheduler sees them: it asks what is there, and moves nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from functools import partial

from lwkv.background.workers import Workers
from lwkv.config.settings import Config
from lwkv.integrations.vllm.reports import RankInfo
from lwkv.keys import ChunkKey
from lwkv.storage import Tier, TierSetup
from lwkv.storage.circuit_breaker import CircuitBreaker
from lwkv.storage.registry import open_tiers
from lwkv.storage.tier import Ordered
from lwkv.storage.tier_answers import ask_whether_there
from lwkv.storage.use_notes import UseNotes
from lwkv.telemetry.counters import Counters

ANSWER_S = 0.5
"""Seconds that a lookup waits for a tier; what it has not answered by then is computed."""


class TierLookup:
    """One tier. One that takes too long, or fails, has nothing, and is not asked for a while."""

    def __init__(self, tier: Tier, counters: Counters) -> None:
        self._tier = tier
        self.name = tier.name
        self._calls = CircuitBreaker(tier.name, "lookup", 1, ANSWER_S, counters, time.monotonic)
        self._notes: UseNotes | None = None
        if isinstance(tier, Ordered):
            self._notes = UseNotes(tier, tier.name, ANSWER_S, counters, time.monotonic)
        self._end = Workers(f"{tier.name}-close", 1)

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        call = self._calls.submit(partial(ask_whether_there, self._tier, keys, ANSWER_S))
        wait([call], ANSWER_S)
        answered = call.done() and not call.cancelled() and call.exception() is None
        return call.result() if answered else [False] * len(keys)

    def follow(self, prompt: Sequence[ChunkKey]) -> None:
        if self._notes is not None:
            self._notes.add(prompt)

    def close(self) -> None:
        """Close the tier once its last call has returned, on a thread of its own: it may block."""
        for calls in self._all_calls():
            calls.close(ANSWER_S)
        self._end.submit(self._close)
        self._end.close(ANSWER_S)

    def _close(self) -> None:
        for calls in self._all_calls():
            calls.wait_idle(float("inf"))
        self._tier.close()

    def _all_calls(self) -> Sequence[CircuitBreaker]:
        return (self._calls,) if self._notes is None else (self._notes.calls, self._calls)


class TierLookups:
    """One rank's tiers below host memory, nearest first; see `open_lower_tiers`."""

    def __init__(self, tiers: Sequence[TierLookup], clock: Callable[[], float] = time.monotonic) -> None:
        self._tiers = tiers
        self._clock = clock
        self._unread_until: dict[str, float] = {}

    def leave_alone(self, tiers: Mapping[str, float]) -> None:
        """Find nothing in `tiers`, for so many seconds each, and ask all others again.

        The rank loads nothing from them meanwhile, though a lookup may be answered.
        """
        now = self._clock()
        self._unread_until = {name: now + seconds for name, seconds in tiers.items()}

    def find(self, keys: Sequence[ChunkKey]) -> list[str | None]:
        """The nearest tier that has each chunk, of those that the rank reads from; None for none."""
        found: list[str | None] = [None] * len(keys)
        now = self._clock()
        for tier in self._tiers:
            rest = [i for i, name in enumerate(found) if name is None]
            if not rest or now < self._unread_until.get(tier.name, now):
                continue
            for i, there in zip(rest, tier.contains([keys[i] for i in rest]), strict=True):
                found[i] = tier.name if there else None
        return found

    def follow(self, prompt: Sequence[ChunkKey]) -> None:
        """Let the tiers know that a prompt that begins with these chunks is to be loaded; never waits."""
        for tier in self._tiers:
            tier.follow(prompt)

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()


def open_lower_tiers(config: Config, info: RankInfo) -> TierLookups:
    """Open a rank's lower tiers a second time, for lookups. Raises ConfigError."""
    counters = Counters()
    setup = TierSetup(config, info.num_layers, info.page_bytes, info.page_format, counters)
    return open_lookups(setup)


def open_lookups(setup: TierSetup) -> TierLookups:
    """Open the tiers that the configuration names. Raises ConfigError."""
    return TierLookups([TierLookup(tier, setup.counters) for tier in open_tiers(setup)])
