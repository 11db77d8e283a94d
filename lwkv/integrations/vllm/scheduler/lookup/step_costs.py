"""What each step loads and computes, noted so that its time says how fast loading and computing are."""

from __future__ import annotations

import logging
from typing import Any

from lwkv.integrations.vllm.reports import RankReport
from lwkv.integrations.vllm.scheduler.lookup.costs import Costs
from lwkv.integrations.vllm.scheduler.lookup.measured.timed_steps import tokens_and_position
from lwkv.integrations.vllm.scheduler.request_state import RequestState
from lwkv.integrations.vllm.worker.meter import rank_gauge
from lwkv.telemetry.counters import Counters

log = logging.getLogger(__name__)


class StepCosts:
    """Reports the steps to `Costs`, where loading is weighed against computing at all.

    Args:
        costs: None where all that is found is loaded.
    """

    def __init__(self, costs: Costs | None, counters: Counters) -> None:
        self._costs = costs
        self._counters = counters
        self._num_loading, self._loads_from_host = 0, True
        self._shown: dict[tuple[str, int], int] = {}

    def note_load(self, tracked: RequestState, num_loaded: int) -> None:
        """Note what a request loads in the next step, and what was chosen not to be loaded."""
        if num_loaded:
            self._num_loading += num_loaded
            self._loads_from_host &= tracked.found.are_in_host(tracked.found.chunks_of(num_loaded))
        choice, tracked.choice = tracked.choice, None
        if choice is not None:
            self._counters.add("requests_cheaper_to_compute")
            log.debug(
                "request %s: %d cached tokens are loaded; %s",
                *(tracked.request.request_id, num_loaded, choice.estimates),
            )

    def begin(self, step: int, output: Any, measures: bool = True) -> bool:
        """Whether the workers are to report the end of this step, to measure how long it took.

        Args:
            measures: False where it does more than to load and to compute its tokens.
        """
        loading, self._num_loading = self._num_loading, 0
        from_host, self._loads_from_host = self._loads_from_host, True
        if self._costs is None or not measures:
            return False
        tokens, position = tokens_and_position(output)
        return self._costs.begin_step(step, tokens, position, loading, from_host)

    def learn(self, report: RankReport) -> None:
        """Take over how long a step, and reads from lower tiers, took."""
        if self._costs is not None:
            self._costs.learn(report)

    def result_came(self) -> None:
        """Note that all was learnt of a step."""
        if self._costs is not None:
            self._costs.result_came()

    def new_gauges(self) -> dict[str, int]:
        """The speeds measured, by WorkerMeter's names; none where they are those of the last call."""
        known, self._shown = self._shown, {} if self._costs is None else self._costs.gauges()
        return {} if known == self._shown else {rank_gauge(*name): n for name, n in self._shown.items()}
