from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from page_coders import MakeCoder, coder_of

from lwkv.platforms import Platform


@pytest.fixture(params=["torch", "triton"])
def make_coder(request: pytest.FixtureRequest, platform: Platform) -> MakeCoder:
    return coder_of(request.param, platform)


@pytest.fixture(params=["torch", "triton"])
def make_fp8(request: pytest.FixtureRequest, platform: Platform) -> MakeCoder:
    return coder_of(request.param, platform, "fp8")


@pytest.fixture
def run(platform: Platform, device: torch.device) -> Callable[[Callable[[], object]], None]:
    """Do device work on the current stream and wait for it."""

    def queue(work: Callable[[], object]) -> None:
        platform.launch(platform.current_stream(device), work)
        platform.synchronize_device(device)

    return queue
