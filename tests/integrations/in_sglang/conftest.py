"""SGLang as it is tested: on the CPU, without a network, and with two modules that stand in for others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from integrations.in_sglang.prompts import ALL_BATCHES
from integrations.in_sglang.rig import started
from integrations.in_vllm import models


@pytest.fixture(scope="session", autouse=True)
def stand_in_calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file with all calls of stand-ins: there must be none."""
    calls = tmp_path_factory.mktemp("stand-ins") / "calls"
    os.environ["STAND_IN_CALLS"] = str(calls)
    yield calls
    assert not calls.exists(), f"called: {calls.read_text()}"


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.written(models.write_llama, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def expected(llama: Path) -> dict[tuple[int, ...], list[int]]:
    """What the model answers to every prompt of the tests, without any cache."""
    with started(llama, disable_radix_cache=True) as engine:
        return {
            tuple(prompt): answer.tokens
            for batch in ALL_BATCHES
            for prompt, answer in zip(batch, engine.ask(batch), strict=True)
        }
