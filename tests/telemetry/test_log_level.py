"""LWKV_LOG_LEVEL decides what is logged, for the command and for an engine inside another program."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from oracle import Oracle

from lwkv.cli import main as cli
from lwkv.errors import ConfigError
from lwkv.platforms import Platform
from lwkv.telemetry.log_level import VARIABLE, follow_log_level


@contextmanager
def fresh_logger() -> Iterator[logging.Logger]:
    """Our logger as it is in a fresh process, where nobody shows its lines. No fixture: pytest would."""
    logger = logging.getLogger("lwkv")
    before = logger.level, logger.handlers[:], logger.propagate
    logger.handlers.clear()
    logger.propagate = False
    yield logger
    logger.setLevel(before[0])
    logger.handlers[:], logger.propagate = before[1:]


def test_without_the_variable_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with fresh_logger() as logger:
        follow_log_level()
        assert (logger.level, logger.handlers) == (logging.NOTSET, [])


def test_lines_that_nobody_would_show_go_to_stderr_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "Info")
    with fresh_logger() as logger:
        for _ in range(2):
            follow_log_level()
        logging.getLogger("lwkv.pool.host_pool").info("so it is")
        logging.getLogger("lwkv.pool.host_pool").debug("not said")
        assert len(logger.handlers) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("INFO lwkv.pool.host_pool: so it is")


def test_a_program_s_own_handlers_stay_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = logging.NullHandler()
    monkeypatch.setenv(VARIABLE, "debug")
    with fresh_logger() as logger:
        logger.addHandler(own)
        follow_log_level()
        assert (logger.level, logger.handlers) == (logging.DEBUG, [own])


def test_a_level_that_does_not_exist_is_refused_with_those_that_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "loud")
    with pytest.raises(ConfigError, match=r"LWKV_LOG_LEVEL: got 'loud'; allowed: debug, info"):
        follow_log_level()
    assert cli.main(["inspect", "/not/there"]) == 2
    assert "got 'loud'" in capsys.readouterr().err


def test_an_engine_follows_it(
    platform: Platform,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(VARIABLE, "info")
    with fresh_logger():
        Oracle(platform, device).engine().close()
    assert "INFO lwkv.engine: moves KV" in capsys.readouterr().err
    monkeypatch.setenv(VARIABLE, "0")
    with pytest.raises(ConfigError, match="got '0'"):
        Oracle(platform, device).engine()
