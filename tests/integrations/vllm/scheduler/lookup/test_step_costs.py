"""Which steps are measured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lwkv.integrations.vllm.scheduler.lookup.costs import Costs
from lwkv.integrations.vllm.scheduler.lookup.measured.timed_steps import LEAST_TOKENS
from lwkv.integrations.vllm.scheduler.lookup.step_costs import StepCosts
from lwkv.telemetry.counters import Counters


@pytest.mark.parametrize("measures", [True, False])
def test_a_step_that_also_blends_is_not_taken_for_the_time_of_its_tokens(measures: bool) -> None:
    """Its end is reported all the same, since it stores something."""
    costs = Costs(8, True)
    new = SimpleNamespace(req_id="one", num_computed_tokens=0)
    output = SimpleNamespace(
        num_scheduled_tokens={"one": LEAST_TOKENS + 1},
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
    )
    assert StepCosts(costs, Counters()).begin(1, output, measures=measures) == measures
    assert bool(costs._steps) == measures
