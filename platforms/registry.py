"""Which platforms there are and which one this process uses.

The built-in ones are named here; others come from the entry points `lwkv.platforms` of installed packages,
each a callable without arguments that makes a Platform.
"""

from __future__ import annotations

import difflib
import os
import threading
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import cast

import torch

from lwkv.errors import PlatformError, PlatformMissingError
from lwkv.platforms.protocol import Platform

GROUP = "lwkv.platforms"
VARIABLE = "LWKV_PLATFORM"
_SET_VARIABLE = f"set {VARIABLE}=cpu to use the host"

# In the order of detection. MUSA and XPU stacks can make torch.cuda look present, so CUDA comes after them.
_ACCELERATORS = {
    "musa": "lwkv.platforms.musa:MUSA",
    "xpu": "lwkv.platforms.xpu:XPU",
    "cuda": "lwkv.platforms.cuda:CUDA",
}
_HOST = {"cpu": "lwkv.platforms.cpu:CPU"}

_opened: dict[str, Platform] = {}
_lock = threading.RLock()


def platform_names() -> list[str]:
    """The names that `open_platform` knows, in the order of detection."""
    return list(_homes())


def platforms_with(feature: str) -> list[str]:
    """The names of the platforms that have `feature`, a field of Features, whether they are here or not."""
    return [name for name in platform_names() if getattr(_open(name).features, feature)]


def detect_platform(override: str | None = None) -> Platform:
    """Choose the platform of this process: `override`, then LWKV_PLATFORM, then the first one that is there.

    Raises:
        PlatformError (a ValueError): an unknown name, or HPU is what was named or what the machine has.
        PlatformMissingError (a RuntimeError): a known platform that is not there.
    """
    if override is not None:
        return _open_named(override, "argument")
    if named := os.environ.get(VARIABLE):
        return _open_named(named, f"environment variable {VARIABLE}")
    if _hpu_is_there():
        raise _hpu_error("this machine's accelerator is HPU", _SET_VARIABLE)
    return next(platform for name in platform_names() if (platform := _open(name)).is_available())


def open_platform(name: str) -> Platform:
    """The platform called `name`, one object a process. Raises like `detect_platform`."""
    return _open_named(name)


def platform_for(device: torch.device | str) -> Platform:
    """The platform of a tensor's device, told by `device.type` alone. Raises like `detect_platform`."""
    kind = torch.device(device).type
    if kind == "hpu":
        raise _hpu_error(f"got a tensor or device on {device}", "keep the caches on the host")
    if kind in _ACCELERATORS or kind in _HOST:
        return open_platform(kind)
    for name in platform_names():
        if _open(name).device_type == kind:
            return open_platform(name)
    raise PlatformError(
        f"no platform for device {str(device)!r}; known platforms: {_listed(platform_names())}"
    )


def _open_named(name: str, source: str = "") -> Platform:
    told = f"{name!r} ({source})" if source else repr(name)
    if name.lower() == "hpu":
        advice = _SET_VARIABLE if VARIABLE in source else "name the platform 'cpu' to use the host"
        raise _hpu_error(f"got platform {told}", advice)
    if name not in (known := platform_names()):
        near = difflib.get_close_matches(name.lower(), known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise PlatformError(f"unknown platform {told}; known are {_listed(known)}{hint}")
    platform = _open(name)
    if not platform.is_available():
        raise PlatformMissingError(f"platform {told} is not available here: {platform.how_to_get}")
    return platform


def _open(name: str) -> Platform:
    with _lock:
        if name not in _opened:
            homes = _homes()
            _opened[name] = _load(name, homes[name])
        return _opened[name]


def _load(name: str, home: str) -> Platform:
    module, _, attribute = home.partition(":")
    try:
        make = cast(Callable[[], Platform], getattr(import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        raise PlatformMissingError(
            f"platform {name!r} cannot be loaded from {home}: {error}; repair or remove the package that "
            f"brings it, or choose another platform with {VARIABLE}"
        ) from error
    return make()


def _homes() -> dict[str, str]:
    """Every platform's `module:attribute`, by name."""
    homes = _ACCELERATORS | _HOST
    for entry in entry_points(group=GROUP):
        if homes.get(entry.name, entry.value) != entry.value:
            raise PlatformError(
                f"two platforms are called {entry.name!r}: {homes[entry.name]} and {entry.value}; "
                "uninstall the package of one of them"
            )
        homes[entry.name] = entry.value
    # The host is always there, so it is asked last.
    return {name: home for name, home in homes.items() if name not in _HOST} | _HOST


def _listed(names: list[str]) -> str:
    return ", ".join(names)


def _hpu_is_there() -> bool:
    try:
        return bool(torch.hpu.is_available())  # type: ignore[attr-defined]
    except (AttributeError, AssertionError, OSError, RuntimeError):
        return False


def _hpu_error(found: str, advice: str) -> PlatformError:
    return PlatformError(
        f"{found}, which lwkv does not support: its streams keep order between each other and copies wait "
        "for the device, so a layer's transfer cannot overlap with compute. "
        f"To go on, {advice}, or run on CUDA, XPU or MUSA"
    )
