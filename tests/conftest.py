"""Which device the tests run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lwkv.platforms import Platform, open_platform


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--platform", default="cpu", help="device type to test on; one that is not there fails")


@pytest.fixture
def platform(request: pytest.FixtureRequest) -> Iterator[Platform]:
    """The platform under test; its own threads end with the test."""
    chosen = open_platform(request.config.getoption("--platform"))
    yield chosen
    chosen.close()


@pytest.fixture
def device(platform: Platform) -> torch.device:
    return platform.current_device()
