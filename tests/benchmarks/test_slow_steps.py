from __future__ import annotations

import threading
import time

import pytest

from lwkv.benchmarks.vllm import slow_steps


def wait_for_a_report(capfd: pytest.CaptureFixture[str]) -> str:
    text = ""
    while "slow step" not in text or "engine: " not in text:
        time.sleep(0.01)
        text += capfd.readouterr().err
    return text


def takes_long(until: threading.Event) -> None:
    until.wait(0.2)


def test_a_slow_step_says_where_its_thread_was_and_a_step_that_is_not_watched_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(slow_steps.VARIABLE, raising=False)
    assert slow_steps.watch() is None
    with slow_steps.during(None):
        pass
    monkeypatch.setenv(slow_steps.VARIABLE, "40")
    watched = slow_steps.watch()
    assert watched is not None
    with slow_steps.during(watched):
        takes_long(threading.Event())
    assert "test_slow_steps.py" in (text := wait_for_a_report(capfd))
    assert ":takes_long" in text
