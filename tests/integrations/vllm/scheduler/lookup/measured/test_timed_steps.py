from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lwkv.integrations.vllm.scheduler.lookup.measured.timed_steps import LEAST_TOKENS, tokens_and_position


def output(**parts: tuple[int, int, bool]) -> Any:
    """A step's output: for each request where it begins, how many tokens it gets, and whether it is new."""
    new = [SimpleNamespace(req_id=n, num_computed_tokens=p[0]) for n, p in parts.items() if p[2]]
    cached = {name: part[0] for name, part in parts.items() if not part[2]}
    return SimpleNamespace(
        num_scheduled_tokens={name: part[1] for name, part in parts.items()},
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=list(cached.values())
        ),
    )


def test_the_position_of_a_step_is_that_of_its_tokens_on_average() -> None:
    assert tokens_and_position(output(a=(0, 1000, True))) == (999, 500.0)
    assert tokens_and_position(output(a=(0, 1000, True), b=(4000, 1000, False))) == (1998, 2500.0)
    assert tokens_and_position(output(a=(9000, 1, False))) == (0, 0.0)
    decoding = {f"r{number}": (9000, 1, False) for number in range(2 * LEAST_TOKENS)}
    assert tokens_and_position(output(**decoding)) == (0, 0.0), "however many decode"
