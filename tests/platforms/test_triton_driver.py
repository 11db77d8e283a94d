"""Triton counts only where its active driver is for the platform's device type."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lwkv.platforms import triton_driver
from lwkv.platforms.triton_driver import triton_serves
from lwkv.platforms.xpu import XPU


class Driver:
    """`triton.runtime.driver.driver`: finds a backend, or raises as Triton does where it finds none."""

    def __init__(self, backend: str, error: Exception | None = None) -> None:
        self._backend, self._error = backend, error

    @property
    def active(self) -> Any:
        if self._error is not None:
            raise self._error
        return SimpleNamespace(get_current_target=lambda: SimpleNamespace(backend=self._backend))


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Driver | None], None]:
    """Put a Triton with this driver in place, or take away the one that is there."""

    def install(driver: Driver | None) -> None:
        monkeypatch.setattr(triton_driver, "find_spec", lambda name: driver)
        module: Any = ModuleType("triton.runtime.driver")
        module.driver = driver
        for name in ("triton", "triton.runtime"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return install


@pytest.mark.parametrize("device_type", ["cuda", "xpu", "musa"])
@pytest.mark.parametrize("backend", ["cuda", "xpu", "musa", "hip"])
def test_triton_serves_the_device_type_that_its_driver_names(
    install: Callable[[Driver | None], None], caplog: pytest.LogCaptureFixture, device_type: str, backend: str
) -> None:
    install(Driver(backend))
    caplog.set_level("INFO")
    assert triton_serves(device_type) == (backend == device_type)
    (line,) = caplog.messages
    assert device_type in line
    assert ("Triton's" in line) == (backend == device_type)
    assert backend in line


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("0 active drivers ([]). There should only be one."),
        ImportError("libtriton.so: undefined symbol"),
        FileNotFoundError("no C compiler"),
        subprocess.CalledProcessError(1, "cc"),
        AssertionError("Torch not compiled with CUDA enabled"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_triton_whose_driver_cannot_be_used_serves_nothing_and_says_why(
    install: Callable[[Driver | None], None], caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    install(Driver("xpu", error))
    assert not triton_serves("xpu")
    assert f"plain torch: triton's driver cannot be used: {error}" in caplog.text


def test_without_the_package_nothing_is_imported(install: Callable[[Driver | None], None]) -> None:
    install(None)
    sys.modules["triton.runtime.driver"].driver = Driver("xpu")  # type: ignore[attr-defined]
    assert not triton_serves("xpu")


@pytest.mark.parametrize(("is_there", "backend"), [(True, "xpu"), (True, "cuda"), (False, "xpu")])
def test_a_platform_asks_triton_only_where_its_device_is(
    install: Callable[[Driver | None], None],
    make_stub: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    is_there: bool,
    backend: str,
) -> None:
    install(Driver(backend))
    stub = make_stub("xpu", {"is_available": inspect.signature(lambda: None)})
    monkeypatch.setattr(stub, "is_available", lambda: is_there, raising=False)
    assert XPU().features.triton == (is_there and backend == "xpu")
