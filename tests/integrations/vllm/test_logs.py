from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from lwkv.integrations.vllm.logs import VllmHandler, log_as_vllm
from lwkv.telemetry.log_level import VARIABLE


@pytest.fixture
def vllm_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What vLLM's handler writes, and lwkv's logger as it was when the test ends."""
    monkeypatch.delenv(VARIABLE, raising=False)
    text, vllm, lwkv = io.StringIO(), logging.getLogger("vllm"), logging.getLogger("lwkv")
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("%(levelname)s [%(filename)s] %(message)s"))
    before = vllm.level, vllm.propagate, lwkv.level, lwkv.propagate, lwkv.handlers
    vllm.addHandler(handler)
    vllm.setLevel("INFO")
    vllm.propagate = False
    lwkv.handlers = []
    yield text
    vllm.removeHandler(handler)
    vllm.level, vllm.propagate, lwkv.level, lwkv.propagate, lwkv.handlers = before
    lwkv.setLevel(lwkv.level)
    vllm.setLevel(vllm.level)


def test_lines_have_vllm_s_form_and_level_and_are_lwkv_s(vllm_log: io.StringIO) -> None:
    for _ in range(2):
        log_as_vllm()
    log = logging.getLogger("lwkv.storage")
    log.warning("tier %s rests, at %d %%", "disk", 90)
    log.info("a start")
    log.debug("nobody asked")
    assert vllm_log.getvalue().splitlines() == [
        "WARNING [test_logs.py] lwkv: tier disk rests, at 90 %",
        "INFO [test_logs.py] lwkv: a start",
    ]


def test_the_level_of_lwkv_s_own_variable_is_stronger(
    vllm_log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "error")
    logging.getLogger("lwkv").setLevel("ERROR")
    log_as_vllm()
    logging.getLogger("lwkv.storage").warning("not shown")
    assert vllm_log.getvalue() == ""


def test_where_vllm_writes_no_log_of_its_own_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [])
    log_as_vllm()
    assert not any(isinstance(handler, VllmHandler) for handler in logging.getLogger("lwkv").handlers)
