"""Whether chunks that were found are loaded: only as many as come sooner than they are computed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from lwkv.integrations.vllm.reports import RankReport
from lwkv.integrations.vllm.scheduler.lookup.choice import Choice, best_of, num_in_host
from lwkv.integrations.vllm.scheduler.lookup.measured.prefill_times import Floats, PrefillTimes
from lwkv.integrations.vllm.scheduler.lookup.measured.speeds import Speed, is_old
from lwkv.integrations.vllm.scheduler.lookup.measured.tier_speeds import TierSpeeds
from lwkv.integrations.vllm.scheduler.lookup.measured.timed_steps import LEAST_TOKENS, TimedStep
from lwkv.integrations.vllm.scheduler.lookup.patience import MORE, Patience
from lwkv.storage.tier import HOST

STEPS_TO_WAIT = 2
"""vLLM learns at the end of a step what has come, and asks about waiting requests before the next."""

LOOK_UP_S = 0.01
"""Seconds that a look-up into lower tiers may take in any case before its request goes on without."""


class Costs:
    """Measures what vLLM's steps and tiers take, and chooses.

    Nothing is waited for before it is known what computing takes. A tier that was not measured yet takes no
    time: a request that waits for it gives up soon, unless it is fast.

    Args:
        chunk_size: tokens of a chunk.
        layerwise: whether loads go on beside the computation of the same step.
        clock: seconds.
    """

    def __init__(self, chunk_size: int, layerwise: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._chunk_size = chunk_size
        self._layerwise = layerwise
        self._clock = clock
        self._prefill = PrefillTimes()
        self._host = Speed(clock)  # tokens
        self._tiers = TierSpeeds(clock)
        self._steps: dict[int, TimedStep] = {}
        self._last_result = clock()
        self._between_results: deque[float] = deque(maxlen=15)

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
            self._tiers.add(name, info.rank, num_bytes / (info.num_layers * info.page_bytes), seconds)
        step = self._steps.pop(report.step, None)
        if step is not None:
            self._end_step(step)
            # Steps end in order: of those before it nothing more will be heard.
            self._steps = {number: other for number, other in self._steps.items() if number > report.step}

    def result_came(self) -> None:
        """What came of a step has been taken over: the next one has the device to itself from here on."""
        now = self._clock()
        self._between_results.append(now - self._last_result)
        self._last_result = now

    def came_late(self, tiers: Iterable[str], moved_at: float) -> None:
        """Note that a request has waited in vain for these tiers, which brought something last at that time.

        They are not waited for any more before anything is read from them.
        """
        self._tiers.note_late(tiers, moved_at)

    def look_up_s(self, num_tokens: int) -> float:
        """Seconds that a request of so many tokens may wait until it is known what lower tiers have."""
        if not self._prefill.is_known:
            return LOOK_UP_S
        edges = np.array([0.0, float(num_tokens)])
        return max(LOOK_UP_S, MORE * float(self._left(edges)[0]))

    def are_known(self, tiers: Iterable[str]) -> bool:
        """Whether all of `tiers` were measured of late, and let no request wait in vain since."""
        known = (not (self._tiers.is_old(tier) or self._tiers.is_late(tier)) for tier in {*tiers} - {HOST})
        return self._prefill.is_known and all(known)

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
            in_host = num_in_host(tiers)
            measures = in_host < len(tiers) and self._tiers.is_old(tiers[in_host])
            return Choice(in_host, 0.0, 0.0, 0.0, measures=measures)
        size = self._chunk_size
        ends = np.minimum((first // size + 1 + np.arange(len(tiers))) * size, num_tokens).astype(np.float64)
        edges = np.concatenate([[float(first)], ends, [float(num_tokens)]])
        host = np.concatenate([[0.0], np.diff(edges)[:-1].cumsum()]) * self._host_seconds()
        below, left = self._from_below(tiers, queued, waits), self._left(edges)
        times = self._together(below, host, left, waits)
        best = best_of(times, num_in_host(tiers), waits)
        measures = best < len(tiers) and self._is_old(tiers[best])
        there = self._together(np.zeros_like(below), host, left, waits)[: best + 1]
        patience = Patience(there, below[: best + 1], self._step_seconds())
        return Choice(best, float(times[best]), float(times[-1]), float(times[0]), patience, measures)

    def choose_end(
        self,
        ends: Sequence[int],
        brought: Sequence[Sequence[tuple[str, float]]],
        num_local: int,
        num_tokens: int,
        queued: int = 0,
    ) -> Choice:
        """As `choose`, of several ends at one of which a prompt can go on; it waits for what is below.

        Args:
            ends: the tokens to load up to, in order; with the first one nothing is waited for.
            brought: for each end the chunks that lower tiers are to bring, in order: the tier, and how much
                it is of a usual chunk.
            num_local: tokens that vLLM has itself. num_tokens: of the prompt.

        Returns:
            The end as `num_chunks`, by its number. The patience counts the chunks that are brought for it.
        """
        (first, _), *_ = brought[-1]
        if not self._prefill.is_known:
            return Choice(0, 0.0, 0.0, 0.0, measures=self._tiers.is_old(first))
        left = self._left(np.array([*ends, num_tokens], np.float64))
        coming = [self._seconds_of(chunks, queued) for chunks in brought]
        below = np.array([seconds[-1] for seconds in coming])
        host = (np.array(ends) - num_local) * self._host_seconds()
        times = self._together(below, host, left, waits=True)
        best = best_of(times, 0, waits=True)
        # Nothing of it saves anything before all of it is there.
        there = np.full(len(coming[best]), left[0])
        there[-1] = left[best]
        patience = Patience(there, coming[best], self._step_seconds())
        measures = best < len(ends) - 1 and self._tiers.is_old(first)
        return Choice(best, float(times[best]), float(times[-1]), float(times[0]), patience, measures)

    def gauges(self) -> dict[tuple[str, int], int]:
        """What was measured, by name and rank: tokens or chunks a second."""
        known = self._tiers.per_second()
        known |= {("prefill_tokens_per_s", 0): self._prefill.per_second()}
        known |= {("host_tokens_per_s", 0): self._host.per_second}
        return {name: number for name, number in known.items() if number}

    def _end_step(self, step: TimedStep) -> None:
        seconds = self._clock() - max(step.begun, self._last_result)
        if not step.num_loaded:
            self._prefill.add(step.position, step.num_tokens, seconds)
        elif step.num_loaded >= LEAST_TOKENS and self._is_bound_by_load(step, seconds):
            computing = 0.0 if self._layerwise else self._computing_s(step)
            self._host.add(step.num_loaded, seconds - computing)

    def _is_bound_by_load(self, step: TimedStep, seconds: float) -> bool:
        """Whether computing alone would have taken less than half of the step."""
        if not self._prefill.is_known:
            return step.num_tokens < step.num_loaded / 8
        return self._computing_s(step) < seconds / 2

    def _computing_s(self, step: TimedStep) -> float:
        """Seconds that a step takes to compute its tokens."""
        tokens = self._prefill.tokens_s(np.array([float(step.num_tokens)]), np.array([step.position]))
        return self._prefill.step_s() + float(tokens[0])

    def _left(self, edges: Floats) -> Floats:
        """Seconds to compute a prompt from each edge on, but for the last."""
        pieces = self._prefill.tokens_s(np.diff(edges), (edges[1:] + edges[:-1]) / 2)
        from_each: Floats = pieces[::-1].cumsum()[::-1] + self._prefill.step_s()
        return from_each

    def _host_seconds(self) -> float:
        return 0.0 if is_old(self._host, self._clock()) else self._host.seconds_each

    def _from_below(self, tiers: Sequence[str], queued: int, waits: bool) -> Floats:
        """Seconds that lower tiers take for none of the chunks, for the first, and so on."""
        seconds = {tier: 0.0 if tier == HOST else self._tiers.chunk_s(tier) for tier in set(tiers)}
        each = np.array([seconds[tier] for tier in tiers])
        lower = np.flatnonzero([tier != HOST for tier in tiers])
        if len(lower) and each[lower[0]]:
            each[lower[0]] *= 1 + queued
            each[lower[0]] += waits * STEPS_TO_WAIT * self._step_seconds()
        return np.concatenate([[0.0], each.cumsum()])

    def _seconds_of(self, chunks: Sequence[tuple[str, float]], queued: int) -> Floats:
        """Seconds until lower tiers have brought none of these chunks, the first, and so on."""
        each = np.array([size * self._tiers.chunk_s(tier) for tier, size in chunks])
        if len(each) and each[0]:
            each[0] += queued * self._tiers.chunk_s(chunks[0][0])
            each[0] += STEPS_TO_WAIT * self._step_seconds()
        return np.concatenate([[0.0], each.cumsum()])

    def _step_seconds(self) -> float:
        """Seconds from one step to the next where nothing long is computed."""
        return min(self._prefill.step_s() or float("inf"), min(self._between_results, default=0.0))

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
        return is_old(self._host, self._clock()) if tier == HOST else self._tiers.is_old(tier)
