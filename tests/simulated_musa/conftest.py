"""Brings the simulated device into a test process that was asked for `--platform musa`."""

from __future__ import annotations

import importlib.util
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest
import torch

HERE = Path(__file__).parent


def load_simulator() -> ModuleType:
    """Import torch_musa_sim.py, which no search path leads to."""
    if "torch_musa_sim" not in sys.modules:
        spec = importlib.util.spec_from_file_location("torch_musa_sim", HERE / "torch_musa_sim.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules["torch_musa_sim"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["torch_musa_sim"])
    return sys.modules["torch_musa_sim"]


class DeviceOfEveryTest:
    """Sets how streams behave in tests of other folders; no test leaves queued work that failed unnoticed."""

    def __init__(self, streams: str) -> None:
        self._streams = streams

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if HERE in item.path.parents:
            return
        load_simulator().set_late(self._streams == "late")
        if self._streams == "delayed":
            load_simulator().set_delay(0.0, 0.002, seed=zlib.crc32(item.nodeid.encode()))

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self) -> None:
        load_simulator().settle()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--musa-streams",
        choices=["early", "late", "delayed"],
        default="early",
        help="whether simulated streams run at once, when waited for, or after random delays",
    )


def is_simulated(config: pytest.Config) -> bool:
    return bool(config.getoption("--platform") == "musa")


def pytest_configure(config: pytest.Config) -> None:
    if is_simulated(config) and not hasattr(torch, "musa"):
        load_simulator().install()
        # Slower than any device, and of use where an API is used wrongly: few examples show that.
        hypothesis.settings.register_profile("simulated", hypothesis.settings.default, max_examples=15)
        hypothesis.settings.load_profile("simulated")
        config.pluginmanager.register(DeviceOfEveryTest(config.getoption("--musa-streams", default="early")))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    starts_process = collection_path.name == "test_own_process.py"
    is_test = collection_path.name.startswith("test_")
    return True if is_test and starts_process == is_simulated(config) else None


@pytest.fixture
def simulator() -> ModuleType:
    return load_simulator()


@pytest.fixture
def late(simulator: ModuleType) -> Iterator[None]:
    """Every stream runs an operation only when somebody waits for it."""
    simulator.set_late(True)
    yield
    simulator.settle()
