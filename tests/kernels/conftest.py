"""Which kernels the platform under test has: torch's always, Triton's where its features say so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lwkv.kernels import Kernels, TorchKernels, choose_kernels
from lwkv.platforms import Platform, open_platform


def has_triton(config: pytest.Config) -> bool:
    return open_platform(config.getoption("--platform", default="cpu") or "cpu").features.triton


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kernels" in metafunc.fixturenames:
        names = ["torch", "triton"] if has_triton(metafunc.config) else ["torch"]
        metafunc.parametrize("kernels", names, indirect=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    needs_triton = collection_path.name == "triton"
    return True if needs_triton and not has_triton(config) else None


@pytest.fixture
def kernels(request: pytest.FixtureRequest, platform: Platform) -> Kernels:
    return TorchKernels() if request.param == "torch" else choose_kernels(platform)


@pytest.fixture
def run(platform: Platform, device: torch.device) -> Callable[[Callable[[], None]], None]:
    """Do device work on the current stream and wait for it."""

    def queue(work: Callable[[], None]) -> None:
        platform.launch(platform.current_stream(device), work)
        platform.synchronize_device(device)

    return queue
