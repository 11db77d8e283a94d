"""Whether chunks that were found are loaded: only as many as come sooner than they are computed."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lwkv.integrations.vllm.reports import RankReport
from lwkv.integrations.vllm.scheduler.lookup.speeds import Floats, PrefillSpeed, Speed
from lwkv.storage.tier import HOST

LEAST_TOKENS = 256
"""Steps that compute, and loads that bring, fewer tokens say too little of a speed."""

CLEARLY, MUCH = 0.96, 0.8
"""All that is found is loaded unless something else takes less than this share of the time: much less where
loading all is faster than computing all, since what is computed holds up other requests."""

MEASURE_AGAIN_S = 30.0
"""Seconds after which a tier that is too slow is measured again."""


class Choice(NamedTuple):
    """How many of the chunks found are to be loaded, and in how many seconds the prompt is then computed.

    Attributes:
        all_s, none_s: the same if all of them were loaded, or none.
        measures: whether the tier of the first chunk that is left out should be measured again.
    """

    num_chunks: int
    seconds: float
    all_s: float
    none_s: float
    measures: bool = False


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step that is under way: when it was ordered, what it computes, and tokens loaded from host memory."""

    begun: float
    num_tokens: int
    position: float
    num_loaded: int


def tokens_and_position(output: Any) -> tuple[int, float]:
    """How many tokens a step of vLLM's scheduler output prefills, and the mean position of its tokens.

    One token of each request is left out: a step that only decodes prefills none, and its time says nothing
    of prefills. The position is 0 where there are fewer than LEAST_TOKENS.
    """
    scheduled = output.num_scheduled_tokens
    total = sum(scheduled.values())
    if total - len(scheduled) < LEAST_TOKENS:
        return total - len(scheduled), 0.0
    cached = output.scheduled_cached_reqs
    starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    starts |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    weighted = (number * (starts[name] + number / 2) for name, number in scheduled.items())
    return total - len(scheduled), sum(weighted) / total


class Costs:
    """Measures what vLLM's steps and tiers take, and chooses. What was not measured yet takes no time.

    Args:
        chunk_size: tokens of a chunk.
        layerwise: whether loads go on beside the computation of the same step.
        clock: seconds.
    """

    def __init__(self, chunk_size: int, layerwise: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._chunk_size = chunk_size
        self._layerwise = layerwise
        self._clock = clock
        self._prefill = PrefillSpeed()
        self._host = Speed(clock)  # tokens
        self._tiers: defaultdict[tuple[str, int], Speed] = defaultdict(lambda: Speed(clock))  # chunks
        self._steps: dict[int, TimedStep] = {}
        self._last_result = clock()

    def begin_step(
        self, step: int, num_tokens: int, position: float, num_loaded: int, from_host: bool
    ) -> bool:
        """Note a step that is ordered; whether its time is worth to be known.

        Args:
            num_tokens, position: that it computes, and where these are on average.
            num_loaded, from_host: tokens that it loads, and whether all of them are in host memory.
        """
        is_timed = max(num_tokens, num_loaded) >= LEAST_TOKENS and (from_host or not num_loaded)
        if is_timed:
            self._steps[step] = TimedStep(self._clock(), num_tokens, position, num_loaded)
        return is_timed

    def learn(self, report: RankReport) -> None:
        """Take over what a rank has read from lower tiers, and that a step has ended."""
        info = report.info
        for name, (num_bytes, seconds) in report.read.items():
            self._tiers[name, info.rank].add(num_bytes / (info.num_layers * info.page_bytes), seconds)
        step = self._steps.pop(report.step, None)
        if step is not None:
            self._end_step(step)
            # Steps end in order: of those before it nothing more will be heard.
            self._steps = {number: other for number, other in self._steps.items() if number > report.step}

    def result_came(self) -> None:
        """What came of a step has been taken over: the next one has the device to itself from here on."""
        self._last_result = self._clock()

    def choose(
        self, tiers: Sequence[str], first: int, num_tokens: int, queued: int = 0, waits: bool = False
    ) -> Choice:
        """How many of a prompt's chunks found to load, from the first on.

        Args:
            tiers: of each chunk, the slowest that a rank has it in.
            first: the first token that is missing; it is in the first of these chunks.
            num_tokens: of the prompt.
            queued: chunks that lower tiers are to bring before these.
            waits: whether the request waits while lower tiers bring its chunks to host memory.
        """
        if not self._prefill.is_known or not tiers:
            return Choice(len(tiers), 0.0, 0.0, 0.0)
        size = self._chunk_size
        ends = np.minimum((first // size + 1 + np.arange(len(tiers))) * size, num_tokens).astype(np.float64)
        edges = np.concatenate([[float(first)], ends, [float(num_tokens)]])
        tokens = np.diff(edges)
        compute = tokens * self._prefill.seconds_at((edges[1:] + edges[:-1]) / 2)
        left = compute[::-1].cumsum()[::-1]  # from each edge on
        below = self._from_below(tiers, queued)
        host = np.concatenate([[0.0], tokens[:-1].cumsum()]) * self._host_seconds()
        times = self._together(below, host, left, waits)
        best = int(times.argmin())
        if times[best] > (MUCH if times[-1] <= times[0] else CLEARLY) * times[-1]:
            best = len(tiers)
        measures = best < len(tiers) and self._is_old(tiers[best])
        return Choice(best, float(times[best]), float(times[-1]), float(times[0]), measures)

    def gauges(self) -> dict[tuple[str, int], int]:
        """What was measured, by name and rank: tokens or chunks a second."""
        speeds = {(f"{tier}_chunks_per_s", rank): speed for (tier, rank), speed in self._tiers.items()}
        known = {name: speed.per_second for name, speed in speeds.items()}
        known |= {("prefill_tokens_per_s", 0): self._prefill.per_second()}
        known |= {("host_tokens_per_s", 0): self._host.per_second}
        return {name: number for name, number in known.items() if number}

    def _end_step(self, step: TimedStep) -> None:
        seconds = self._clock() - max(step.begun, self._last_result)
        if not step.num_loaded:
            self._prefill.add(step.position, step.num_tokens, seconds)
        elif step.num_loaded >= LEAST_TOKENS and self._is_bound_by_load(step, seconds):
            self._host.add(step.num_loaded, seconds)

    def _is_bound_by_load(self, step: TimedStep, seconds: float) -> bool:
        """Whether computing alone would have taken less than half of the step."""
        if not self._prefill.is_known:
            return step.num_tokens < step.num_loaded / 8
        each = self._prefill.seconds_at(np.array([step.position]))[0]
        return bool(step.num_tokens * each < seconds / 2)

    def _host_seconds(self) -> float:
        return 0.0 if self._is_old(HOST) else self._host.seconds_each

    def _chunk_seconds(self, tier: str) -> float:
        """Seconds until every rank has read a chunk from a lower tier."""
        speeds = [speed.seconds_each for (name, _), speed in self._tiers.items() if name == tier]
        return 0.0 if tier == HOST else max(speeds, default=0.0)

    def _from_below(self, tiers: Sequence[str], queued: int) -> Floats:
        """Seconds that lower tiers take for none of the chunks, for the first, and so on."""
        seconds = {tier: self._chunk_seconds(tier) for tier in set(tiers)}
        each = np.array([seconds[tier] for tier in tiers])
        lower = np.flatnonzero([tier != HOST for tier in tiers])
        if len(lower):
            each[lower[0]] *= 1 + queued
        return np.concatenate([[0.0], each.cumsum()])

    def _together(
        self,
        below: Floats,
        host: Floats,
        left: Floats,
        waits: bool,
    ) -> Floats:
        if not self._layerwise:
            return below + host + left
        if waits:
            return below + np.maximum(host, left)
        return np.maximum(np.maximum(below, host), left)

    def _is_old(self, tier: str) -> bool:
        speeds = [speed for (name, _), speed in self._tiers.items() if name == tier]
        speeds = [self._host] if tier == HOST else speeds
        newest = max((speed.measured_at for speed in speeds if speed.measured_at is not None), default=None)
        return newest is None or self._clock() - newest >= MEASURE_AGAIN_S
