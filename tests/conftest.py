"""Which device the tests run on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lwkv.platforms import Platform, open_platform


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--platform", default="cpu", help="device type to test on; one that is not there fails")
    parser.addoption(
        "--vllm", action="store_true", help="the tests in tests/integrations/in_vllm, which need vLLM"
    )
    parser.addoption("--soak", type=float, default=0.5, metavar="MINUTES", help="how long the soak test runs")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the tests that need a package which is not there in an ordinary run."""
    needs_vllm = collection_path == Path(__file__).parent / "integrations" / "in_vllm"
    return True if needs_vllm and not config.getoption("--vllm") else None


@pytest.fixture(scope="module", autouse=True)
def collector_passes_over_what_was_there() -> None:
    """Torch, the other tests and the like: many tests collect garbage, some of them often."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def platform(request: pytest.FixtureRequest) -> Iterator[Platform]:
    """The platform under test; its own threads end with the test."""
    chosen = open_platform(request.config.getoption("--platform"))
    yield chosen
    chosen.close()


@pytest.fixture
def device(platform: Platform) -> torch.device:
    return platform.current_device()
