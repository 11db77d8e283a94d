"""Which platforms there are and which one this process uses.

The built-in ones are named here; others come from the entry points `lwkv.platforms` of installed packages,
each a callable without arguments that makes a Platform. A broken one is an error for whoever names it; where
a platform is searched for, it is passed over with a warning.
"""

from __future__ import annotations

import difflib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from inspect import getattr_static
from typing import TypeVar

import torch

from lwkv.errors import ErrorsTo, PlatformError, PlatformMissingError
from lwkv.platforms.protocol import Platform
from lwkv.platforms.unsupported import HPU, ROCM, UNSUPPORTED, is_rocm_build

T = TypeVar("T")

log = logging.getLogger(__name__)

GROUP = "lwkv.platforms"
VARIABLE = "LWKV_PLATFORM"
_SET_VARIABLE = f"set {VARIABLE}=cpu to use the host"

# In the order of detection. MUSA and XPU stacks can make torch.cuda look present, so CUDA comes after them.
_BUILT_IN = {
    "musa": "lwkv.platforms.musa:MUSA",
    "xpu": "lwkv.platforms.xpu:XPU",
    "cuda": "lwkv.platforms.cuda:CUDA",
    "cpu": "lwkv.platforms.cpu:CPU",
}

_opened: dict[str, Platform] = {}
_passed_over: set[str] = set()
_lock = threading.RLock()


def platform_names() -> list[str]:
    """The names that `open_platform` knows, in the order of detection."""
    return list(_entries())


def platforms_with(feature: str) -> list[str]:
    """The names of the platforms that have `feature`, a field of Features, whether they are here or not."""
    return [name for name, has in _answers(lambda platform: getattr(platform.features, feature)) if has]


def detect_platform(override: str | None = None, device: torch.device | str | None = None) -> Platform:
    """Choose the platform of this process.

    That is `override`, then LWKV_PLATFORM, then the one of `device`, where the caches are, then the first one
    that is there.

    Raises:
        PlatformError (a ValueError): an unknown name, a device without a platform, or HPU or ROCm is what was
            named or what the machine has.
        PlatformMissingError (a RuntimeError): a known platform that is not there.
    """
    if override is not None:
        return _open_named(override, "argument")
    if named := os.environ.get(VARIABLE):
        return _open_named(named, f"environment variable {VARIABLE}")
    if device is not None:
        return platform_for(device)
    for unsupported in UNSUPPORTED:
        if unsupported.is_there():
            raise unsupported.error(f"this machine's accelerator is {unsupported.title}", _SET_VARIABLE)
    return _open(next(name for name, here in _answers(lambda platform: platform.is_available()) if here))


def open_platform(name: str) -> Platform:
    """The platform called `name`, one object a process. Raises like `detect_platform`."""
    return _open_named(name)


def platform_for(device: torch.device | str) -> Platform:
    """The platform of a tensor's device, told by `device.type` alone. Raises like `detect_platform`."""
    kind = torch.device(device).type
    if kind == "hpu":
        raise HPU.error(f"got a tensor or device on {device}", "keep the caches on the host")
    if kind in _BUILT_IN:
        return open_platform(kind)
    for name, device_type in _answers(lambda platform: platform.device_type):
        if device_type == kind:
            return open_platform(name)
    raise PlatformError(
        f"no platform for device {str(device)!r}; known platforms: {_listed(platform_names())}. Keep the KV "
        f"caches on a device of one of these, or install a package that brings a platform for {kind!r}"
    )


def _nearest(name: str, known: Sequence[str]) -> str | None:
    """The known name that is nearest; None where none is near, or two are equally near, as to "gpu"."""
    near = difflib.get_close_matches(name, known, 2)
    shares = [difflib.SequenceMatcher(None, one, name).ratio() for one in near]
    return near[0] if len(near) == 1 or (near and shares[0] > shares[1]) else None


def _open_named(name: str, source: str = "") -> Platform:
    told = f"{name!r} ({source})" if source else repr(name)
    advice = _SET_VARIABLE if VARIABLE in source else "name the platform 'cpu' to use the host"
    for unsupported in UNSUPPORTED:
        if name.lower() in unsupported.names:
            raise unsupported.error(f"got platform {told}", advice)
    if name not in (known := platform_names()):
        hint = "" if (near := _nearest(name.lower(), known)) is None else f"; did you mean {near!r}?"
        raise PlatformError(f"unknown platform {told}; known are {_listed(known)}{hint}")
    if name == "cuda" and is_rocm_build():
        build = f"torch {torch.__version__}, a build for ROCm"
        raise ROCM.error(f"got platform {told} with {build}", advice)
    platform = _open(name)
    if not _ask(_entries()[name], platform.is_available):
        remedy = _ask(_entries()[name], lambda: platform.how_to_get)
        raise PlatformMissingError(f"platform {told} is not available here: {remedy}")
    return platform


def _open(name: str) -> Platform:
    with _lock:
        if name not in _opened:
            entry = _entries()[name]
            _opened[name] = _ask(entry, partial(_load, entry))
        return _opened[name]


def _load(entry: EntryPoint) -> Platform:
    platform: Platform = entry.load()()
    members = [name for name in vars(Platform) if not name.startswith("_")]
    missing = [name for name in members if getattr_static(platform, name, None) is None]
    if missing:
        raise TypeError(f"it made {platform!r}, which is no platform: it lacks {_listed(missing)}")
    return platform


def _answers(question: Callable[[Platform], T]) -> Iterator[tuple[str, T]]:
    """What every platform answers, by its name; a broken one is passed over with a warning."""
    for name, entry in _entries().items():
        try:
            answer = _ask(entry, lambda name=name: question(_open(name)))  # type: ignore[misc]
        except PlatformMissingError as error:
            if name not in _passed_over:  # platforms are asked several times
                _passed_over.add(name)
                log.warning("a platform is passed over: %s", error)
        else:
            yield name, answer


def ask_platform(platform: Platform, question: Callable[[], T]) -> T:
    """What `question`, which is about `platform`, returns.

    Raises PlatformMissingError where the platform is another package's, and whatever it raised is the cause.
    """
    entry = _entries().get(platform.name)
    return question() if entry is None else _ask(entry, question)


def _ask(entry: EntryPoint, question: Callable[[], T]) -> T:
    """What `question` returns. Whatever the code of another package raises, it is a PlatformMissingError."""
    if _BUILT_IN.get(entry.name) == entry.value:
        return question()
    errors: list[BaseException] = []
    with ErrorsTo(errors.append):
        return question()
    (error,) = errors
    if isinstance(error, PlatformMissingError) or not isinstance(error, Exception):
        raise error
    package = f" of package {entry.dist.name!r}" if entry.dist else ""
    raise PlatformMissingError(
        f"platform {entry.name!r} cannot be used: {entry.value}{package} raised {type(error).__name__}: "
        f"{error}; repair or remove that package, or choose another platform with {VARIABLE}"
    ) from error


def _entries() -> dict[str, EntryPoint]:
    """Every platform by name, in the order of detection."""
    entries = {name: EntryPoint(name, home, GROUP) for name, home in _BUILT_IN.items()}
    for entry in entry_points(group=GROUP):
        known = entries.setdefault(entry.name, entry)
        if known.value != entry.value:
            raise PlatformError(
                f"two platforms are called {entry.name!r}: {known.value} and {entry.value}; "
                "uninstall the package of one of them"
            )
    # The host is always there, so it is asked last.
    host = entries.pop("cpu")
    return entries | {"cpu": host}


def _listed(names: list[str]) -> str:
    return ", ".join(names)
