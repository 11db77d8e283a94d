"""Which device the tests run on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lwkv.platforms import Platform, open_platform

IN_ENGINES = (("--vllm", "in_vllm", "vLLM"), ("--sglang", "in_sglang", "SGLang"))
"""Tests inside real engines, each in an environment of its own."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--platform", default="cpu", help="device type to test on; one that is not there fails")
    parser.addoption("--soak", type=float, default=0.5, metavar="MINUTES", help="how long the soak test runs")
    parser.addoption("--kills", type=int, default=6, help="processes killed in each test of a node's memory")
    for option, folder, package in IN_ENGINES:
        text = f"the tests in tests/integrations/{folder}, which need {package}"
        parser.addoption(option, action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Tensors of tests are tiny: threads that share them cost ten times what they save.

    No property depends on how busy the machine is: by default hypothesis fails one that takes 0.2 s.
    """
    if not any(config.getoption(option) for option, *_ in IN_ENGINES):
        torch.set_num_threads(1)
        from hypothesis import settings  # not there in every engine's environment

        settings.register_profile("any speed", deadline=None)
        settings.load_profile("any speed")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the tests that need a package which is not there in an ordinary run."""
    for option, folder, _ in IN_ENGINES:
        if collection_path == Path(__file__).parent / "integrations" / folder and not config.getoption(
            option
        ):
            return True
    return None


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
