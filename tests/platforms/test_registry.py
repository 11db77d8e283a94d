"""Which platform a process gets, and what it is told when it gets none."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lwkv.errors import LwkvError, PlatformError, PlatformMissingError
from lwkv.platforms import (
    detect_platform,
    open_platform,
    platform_for,
    platform_names,
    platforms_with,
    registry,
)
from lwkv.platforms.cpu import CPU


class Third(CPU):
    """Someone else's platform, for a device type of its own."""

    name = "third"
    device_type = "meta"


class Broken(CPU):
    name = "broken"
    how_to_get = "install the third driver"

    def is_available(self) -> bool:
        return False


def module(there: bool = True) -> Any:
    return SimpleNamespace(is_available=lambda: there)


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No accelerator, no variable, nothing opened yet."""
    monkeypatch.setattr(registry, "_opened", {})
    monkeypatch.setattr(registry, "_passed_over", set())
    monkeypatch.delenv("LWKV_PLATFORM", raising=False)
    for name in ("musa", "hpu"):
        monkeypatch.delattr(torch, name, raising=False)
    monkeypatch.setattr(torch, "xpu", module(there=False))
    monkeypatch.setattr(torch, "cuda", module(there=False))
    install(monkeypatch, [])


def install(
    monkeypatch: pytest.MonkeyPatch, entries: Iterable[tuple[str, str]], package: str | None = None
) -> None:
    """Let the entry points of installed packages be these (name, value) pairs."""
    found = [EntryPoint(name, value, registry.GROUP) for name, value in entries]
    if package is not None:
        for entry in found:
            vars(entry).update(dist=SimpleNamespace(name=package))
    monkeypatch.setattr(registry, "entry_points", lambda group: found if group == registry.GROUP else [])


def test_without_an_accelerator_it_is_the_cpu() -> None:
    assert detect_platform().name == "cpu"


@pytest.mark.parametrize("name", ["musa", "xpu"])
def test_an_accelerator_that_is_there_is_taken(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch, name, module(), raising=False)
    assert detect_platform().name == name


def test_cuda_needs_a_cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", module())
    monkeypatch.setattr(torch.version, "cuda", None)
    assert detect_platform().name == "cpu"
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert detect_platform().name == "cuda"


def test_stacks_that_imitate_cuda_come_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    for name in ("cuda", "xpu", "musa"):
        monkeypatch.setattr(torch, name, module(), raising=False)
        assert detect_platform().name == name


def test_an_accelerator_that_raises_when_asked_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise RuntimeError("cannot re-initialize in a forked child")

    monkeypatch.setattr(torch, "musa", SimpleNamespace(is_available=fail), raising=False)
    assert detect_platform().name == "cpu"


def test_hpu_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "hpu", module(), raising=False)
    monkeypatch.setattr(torch, "musa", module(), raising=False)
    with pytest.raises(ValueError, match=r"HPU.*cannot overlap with compute.*LWKV_PLATFORM=cpu"):
        detect_platform()


def test_hpu_software_without_a_card_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "hpu", module(there=False), raising=False)
    assert detect_platform().name == "cpu"


def test_the_variable_comes_before_everything_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "hpu", module(), raising=False)
    monkeypatch.setattr(torch, "musa", module(), raising=False)
    monkeypatch.setenv("LWKV_PLATFORM", "cpu")
    assert detect_platform().name == "cpu"


def test_the_argument_comes_before_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LWKV_PLATFORM", "nonsense")
    assert detect_platform("cpu").name == "cpu"


def test_an_empty_variable_means_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LWKV_PLATFORM", "")
    assert detect_platform().name == "cpu"


def test_hpu_by_name_or_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LWKV_PLATFORM", "hpu")
    with pytest.raises(ValueError, match=r"got platform 'hpu' \(environment variable.*set LWKV_PLATFORM=cpu"):
        detect_platform()
    for name in ("hpu", "HPU"):
        with pytest.raises(
            PlatformError, match=rf"got platform '{name}' \(argument\).*name the platform 'cpu'"
        ):
            detect_platform(name)
    with pytest.raises(ValueError, match="on hpu"):
        platform_for(torch.device("hpu"))


def test_an_unknown_name_gets_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'cdua'; known are musa, xpu, cuda, cpu; did you mean 'cuda'\?"):
        open_platform("cdua")


def test_a_name_that_is_as_near_to_two_gets_the_known_ones_alone() -> None:
    with pytest.raises(ValueError, match=r"'gpu'; known are musa, xpu, cuda, cpu$"):
        open_platform("gpu")


@pytest.mark.parametrize("name", ["CUDA", "Cud", "XPU"])
def test_a_wrong_name_is_reported_with_where_it_came_from(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    nearest = rf"known are .*; did you mean '{'xpu' if name == 'XPU' else 'cuda'}'\?"
    with pytest.raises(PlatformError, match=rf"unknown platform '{name}' \(argument\); {nearest}"):
        detect_platform(name)
    monkeypatch.setenv("LWKV_PLATFORM", name)
    with pytest.raises(PlatformError, match=rf"'{name}' \(environment variable LWKV_PLATFORM\); {nearest}"):
        detect_platform()


def test_a_missing_platform_is_reported_with_where_its_name_came_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(PlatformMissingError, match=r"'xpu' \(argument\) is not available here: install"):
        detect_platform("xpu")
    monkeypatch.setenv("LWKV_PLATFORM", "xpu")
    with pytest.raises(PlatformMissingError, match=r"'xpu' \(environment variable LWKV_PLATFORM\) is not"):
        detect_platform()


@pytest.mark.parametrize(
    ("built_for", "advice"),
    [
        (None, "without CUDA: install a CUDA build"),
        ("13.0", r"built for CUDA 13\.0, but finds no GPU: nvidia-smi"),
    ],
)
def test_a_missing_gpu_is_another_matter_than_a_torch_without_cuda(
    monkeypatch: pytest.MonkeyPatch, built_for: str | None, advice: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built_for)
    with pytest.raises(PlatformMissingError, match=advice):
        open_platform("cuda")


@pytest.mark.parametrize(
    ("error", "kind"), [(PlatformError, ValueError), (PlatformMissingError, RuntimeError)]
)
def test_the_errors_are_lwkvs_own_and_pythons_too(error: type, kind: type) -> None:
    assert issubclass(error, LwkvError)
    assert issubclass(error, kind)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("musa", "torch_musa is not on PyPI"), ("xpu", "whl/xpu"), ("cuda", "nvidia-smi|CUDA build of torch")],
)
def test_a_known_platform_that_is_absent_says_how_to_get_it(name: str, hint: str) -> None:
    with pytest.raises(RuntimeError, match=f"'{name}' is not available here: .*{hint}"):
        open_platform(name)


def test_a_platform_is_one_object_a_process() -> None:
    assert open_platform("cpu") is open_platform("cpu") is platform_for("cpu") is detect_platform()


def test_a_device_gets_the_platform_of_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "xpu", module())
    assert platform_for(torch.device("xpu", 1)).name == "xpu"
    assert platform_for(torch.zeros(1).device).name == "cpu"
    with pytest.raises(RuntimeError, match="'cuda' is not available"):
        platform_for("cuda:0")
    for device in ("meta", "mps:0"):
        with pytest.raises(
            ValueError, match=f"no platform for device '{device}'; known platforms: musa, xpu, cuda, cpu"
        ):
            platform_for(device)


def test_platforms_of_other_packages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [("third", f"{__name__}:Third")])
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(Third=Third))
    assert platform_names() == ["musa", "xpu", "cuda", "third", "cpu"]
    assert isinstance(open_platform("third"), Third)
    assert isinstance(platform_for("meta"), Third)
    assert isinstance(detect_platform(), Third)


def test_an_absent_platform_of_another_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [("broken", "someone:Broken")])
    monkeypatch.setitem(sys.modules, "someone", SimpleNamespace(Broken=Broken))
    with pytest.raises(RuntimeError, match="'broken' is not available here: install the third driver"):
        open_platform("broken")
    assert detect_platform().name == "cpu"


def test_two_platforms_of_one_name_are_an_error_that_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [("third", "one:P"), ("third", "two:P")])
    with pytest.raises(ValueError, match="'third': one:P and two:P; uninstall"):
        platform_names()
    install(monkeypatch, [("cuda", "other:P")])
    with pytest.raises(ValueError, match=r"'cuda': lwkv\.platforms\.cuda:CUDA and other:P"):
        open_platform("cuda")


def test_one_package_found_twice_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [("third", "one:P"), ("third", "one:P")])
    assert "third" in platform_names()


@pytest.mark.parametrize("value", ["lwkv_no_such_package:P", "sys:NoSuchPlatform"])
def test_a_package_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    install(monkeypatch, [("third", value)])
    with pytest.raises(RuntimeError, match=f"'third' cannot be used: {value} raised .*LWKV_PLATFORM"):
        open_platform("third")


class Lawless(CPU):
    """Someone else's platform, broken in the way its class says."""

    def is_available(self) -> bool:
        raise KeyError("driver version")

    @staticmethod
    def needs_arguments(driver: str) -> CPU:
        raise AssertionError(driver)

    @staticmethod
    def makes_something_else() -> object:
        return object()

    @staticmethod
    def fails() -> CPU:
        raise ZeroDivisionError("no devices to divide memory by")


BROKEN = {
    "lwkv_no_such_package:P": "ModuleNotFoundError: No module named 'lwkv_no_such_package'",
    "someone:P.no_such_attribute": "AttributeError",
    "someone": "TypeError",
    "someone:P": "KeyError: 'driver version'",
    "someone:P.needs_arguments": "TypeError: .*missing 1 required positional argument",
    "someone:P.makes_something_else": "TypeError: it made <object.*>, which is no platform: it lacks name, ",
    "someone:P.fails": "ZeroDivisionError: no devices",
}


@pytest.mark.parametrize("value", BROKEN)
def test_a_broken_package_is_named_and_passed_over_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str
) -> None:
    install(monkeypatch, [("third", value)], package="lwkv-third")
    monkeypatch.setitem(sys.modules, "someone", SimpleNamespace(P=Lawless))
    text = f"platform 'third' cannot be used: {value} of package 'lwkv-third' raised {BROKEN[value]}"
    assert detect_platform().name == "cpu"
    assert re.search(f"passed over: {text}", caplog.text)
    assert detect_platform().name == "cpu"
    assert len(caplog.records) == 1
    with pytest.raises(PlatformMissingError, match=text):
        open_platform("third")
    with pytest.raises(PlatformError, match="no platform for device 'meta'"):
        platform_for("meta")
    assert "cpu" in platforms_with("blending")


def test_a_broken_package_is_not_asked_where_another_platform_is_named_or_found(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, [("third", "lwkv_no_such_package:P")])
    monkeypatch.setattr(torch, "xpu", module())
    assert detect_platform().name == "xpu"
    assert detect_platform("cpu").name == platform_for("cpu").name == "cpu"
    assert caplog.text == ""


def test_a_remedy_that_raises_is_the_package_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    class Speechless(Third):
        def is_available(self) -> bool:
            return False

        @property
        def how_to_get(self) -> str:
            raise KeyError("no text")

    install(monkeypatch, [("third", "someone:P")], package="lwkv-third")
    monkeypatch.setitem(sys.modules, "someone", SimpleNamespace(P=Speechless))
    with pytest.raises(PlatformMissingError, match="of package 'lwkv-third' raised KeyError: 'no text'"):
        open_platform("third")


def test_ctrl_c_in_a_package_is_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> CPU:
        raise KeyboardInterrupt

    install(monkeypatch, [("third", "someone:make")])
    monkeypatch.setitem(sys.modules, "someone", SimpleNamespace(make=interrupt))
    with pytest.raises(KeyboardInterrupt):
        detect_platform()


def test_an_entry_point_may_name_an_attribute_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [("third", "someone:Factory.make")])
    monkeypatch.setitem(sys.modules, "someone", SimpleNamespace(Factory=SimpleNamespace(make=Third)))
    assert isinstance(open_platform("third"), Third)
    assert isinstance(detect_platform(), Third)


def test_the_device_of_the_caches_comes_before_what_else_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "xpu", module())
    assert detect_platform(device="cpu").name == "cpu"
    assert detect_platform(device=torch.device("xpu", 1)).name == "xpu"
    assert detect_platform("xpu", device="cpu").name == "xpu"
    monkeypatch.setenv("LWKV_PLATFORM", "xpu")
    assert detect_platform(device="cpu").name == "xpu"


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of torch for ROCm, and a device."""
    monkeypatch.setattr(torch.version, "hip", "6.4.43482", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch, "cuda", module())


ROCM_ERROR = r"ROCm.*, which lwkv does not support: .*never tried.*docs/platforms\.md"


@pytest.mark.parametrize("name", ["cuda", "rocm", "HIP"])
def test_rocm_by_name_is_refused_with_the_reason(rocm: None, name: str) -> None:
    with pytest.raises(PlatformError, match=rf"got platform '{name}' \(argument\).*does not support: lwkv"):
        detect_platform(name)


def test_rocm_is_refused_where_it_is_found(rocm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=ROCM_ERROR + ".*LWKV_PLATFORM=cpu"):
        detect_platform()
    with pytest.raises(ValueError, match=ROCM_ERROR):
        platform_for("cuda:0")
    assert platform_for("cpu").name == "cpu"
    monkeypatch.setenv("LWKV_PLATFORM", "cpu")
    assert detect_platform().name == "cpu"


def test_a_build_for_rocm_without_a_device_is_no_reason_to_stop(
    rocm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "cuda", module(there=False))
    assert detect_platform().name == "cpu"


def test_blending_is_offered_where_it_has_been_shown() -> None:
    assert platforms_with("blending") == ["xpu", "cuda", "cpu"]


def test_importing_starts_nothing() -> None:
    program = (
        "import threading, torch, lwkv.platforms; "
        "assert not torch.cuda.is_initialized() and threading.active_count() == 1; "
        "from lwkv.platforms import registry; print(registry._opened)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "{}\n"


def test_a_registered_device_module_is_seen_in_a_real_process() -> None:
    program = """
import types, torch
fake = types.ModuleType("torch.hpu"); fake.is_available = lambda: True
torch._register_device_module("hpu", fake)
from lwkv.platforms import detect_platform
try:
    detect_platform()
except ValueError as error:
    print("HPU" in str(error))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
