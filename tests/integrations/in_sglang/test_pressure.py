"""Requests that are aborted, retracted and preempted in a real SGLang, and flushes in between."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from integrations.in_sglang.prompts import BATCHES, DOCUMENTS, tokens
from integrations.in_sglang.rig import Engine, started, with_lwkv
from integrations.in_sglang.test_engines import WHOLE, Expected, eventually, require_right

PAGE = 64
RETRACTION = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "3"}


@pytest.fixture(scope="module")
def engine(llama: Path) -> Iterator[Engine]:
    """One with room for few requests, where every third step of decoding retracts some of them."""
    settings = {
        "page_size": PAGE,
        "max_total_tokens": 2560,
        "max_running_requests": 6,
        "chunked_prefill_size": 256,
        "enable_priority_scheduling": True,
        "enable_metrics": True,
    }
    with started(llama, RETRACTION, **settings, **with_lwkv(on_flush="forget")) as engine:
        yield engine


def test_what_is_not_aborted_is_answered_right_whatever_happens_beside_it(
    engine: Engine, expected: Expected
) -> None:
    drawn, from_host = random.Random(5), 0
    for batch in BATCHES[:14]:
        # Copies of prompts, with the same pages to load, are aborted before, while and after they are loaded.
        doomed = [drawn.choice(batch) + tokens(drawn.randrange(1 << 20), 30) for _ in range(4)]
        prompts = [*batch, *doomed]
        priorities = [drawn.randrange(4) for _ in prompts]
        aborts = {len(batch) + i: drawn.choice([0.0, 0.01, 0.05, 0.2, 0.5]) for i in range(len(doomed))}
        answers = engine.ask_each(prompts, priorities, aborts)
        require_right(answers[: len(batch)], batch, expected)
        assert {answer.ended for answer in answers[: len(batch)]} == {"length"}
        from_host += sum(answer.from_host for answer in answers[: len(batch)])
    assert from_host > 0
    assert "retracted_reqs" in engine.log
    assert "External linker load failed" not in engine.log


def test_pins_of_aborted_requests_come_back(engine: Engine) -> None:
    assert eventually(lambda: engine.metric("sglang:lwkv_pins") == 0)


def test_a_flush_forgets_and_what_is_stored_after_it_is_found(engine: Engine, expected: Expected) -> None:
    for batch in DOCUMENTS[:2]:
        for host_hits in (0, WHOLE):
            (answer,) = engine.ask(batch)
            require_right([answer], batch, expected)
            assert (answer.from_device, answer.from_host) == (0, host_hits)
            if not host_hits:
                drop_from_the_device(engine)
    engine.flush()
    (forgotten,) = engine.ask(DOCUMENTS[0])
    assert (forgotten.from_device, forgotten.from_host) == (0, 0)
    require_right([forgotten], DOCUMENTS[0], expected)


def drop_from_the_device(engine: Engine) -> None:
    """Ask for other prompts that take all of the device's room."""
    for seed in range(7):
        engine.ask([tokens(9000 + seed, 385)])
