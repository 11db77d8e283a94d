"""A line that could come with every request comes once a minute."""

from __future__ import annotations

import logging

import pytest

from lwkv.telemetry.log_throttle import PERIOD_S, LogThrottle


def test_a_line_comes_at_once_then_once_a_period_with_the_number_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [7.0]
    rarely = LogThrottle(logging.getLogger("test"), lambda: now[0])
    for step in range(5):
        rarely.warn("no room for %d", step)
        now[0] += PERIOD_S / 2
    assert caplog.messages == [
        "no room for 0",
        "no room for 2 (1 more lines like this were left out)",
        "no room for 4 (1 more lines like this were left out)",
    ]
