from __future__ import annotations

import logging

import pytest
import torch

from lwkv.config import foreign_variables
from lwkv.config.foreign_variables import warn_of_foreign_variables
from lwkv.config.settings import Config
from lwkv.engine import CacheEngine
from lwkv.metadata import CacheMetadata


@pytest.fixture(autouse=True)
def no_line_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign_variables._warn.cache_clear()
    for name in ("LMCACHE_LOCAL_CPU", "LMCACHE_CHUNK_SIZE"):
        monkeypatch.delenv(name, raising=False)


def make_engine() -> None:
    metadata = CacheMetadata("m", 1, 1, 4, torch.float32)
    caches = {"0": torch.zeros(8, 1, 4, 8)}
    config = Config(chunk_size=4, max_local_cpu_size=0.001)
    CacheEngine.create(config, metadata, caches, layout_hints={"block_size": 4}, platform="cpu").close()


def test_an_engine_names_variables_of_lmcache_in_one_line_a_process_and_shows_no_value(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LMCACHE_LOCAL_CPU", "secret")
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "256")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            make_engine()
    assert [record.getMessage() for record in caplog.records] == [
        "LMCACHE_CHUNK_SIZE, LMCACHE_LOCAL_CPU are ignored: lwkv reads variables that begin with LWKV_"
    ]


def test_where_no_such_variable_is_set_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_foreign_variables()
    assert not caplog.records


def test_one_variable_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "256")
    line = "LMCACHE_CHUNK_SIZE is ignored: lwkv reads variables that begin with LWKV_"
    assert foreign_variables.foreign_variables() == line
