"""vLLM as it is tested: on the CPU, in this process, without anything from the network."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from integrations.in_vllm import models
from integrations.in_vllm.reference import Elsewhere

os.environ.update(
    {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # vLLM has many of its own


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.written(models.write_llama, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.written(models.write_lfm2, tmp_path_factory.mktemp("lfm2"))


@pytest.fixture(scope="session")
def plain(llama: Path) -> Iterator[Elsewhere]:
    """The same model without lwkv, and without a prefix cache."""
    engine = Elsewhere(llama, enable_prefix_caching=False)
    yield engine
    engine.close()


@pytest.fixture
def minutes(request: pytest.FixtureRequest) -> float:
    """How long the soak tests run."""
    return float(request.config.getoption("--soak"))
