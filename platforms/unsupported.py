"""Device types that lwkv knows and does not support: how they are recognized, and what it says of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lwkv.errors import PlatformError

_SUPPORTED = "CUDA, XPU or MUSA"


@dataclass(frozen=True)
class Unsupported:
    """`names` are what users call it, in lower case; `is_there` says whether this machine has it."""

    title: str
    names: frozenset[str]
    reason: str
    is_there: Callable[[], bool]

    def error(self, found: str, advice: str) -> PlatformError:
        """The error where `found` names what was asked for or found; `advice` says how to go on."""
        return PlatformError(
            f"{found}, which lwkv does not support: {self.reason}. To go on, {advice}, or run on {_SUPPORTED}"
        )


def _hpu_is_there() -> bool:
    try:
        return bool(torch.hpu.is_available())  # type: ignore[attr-defined]
    except (AttributeError, AssertionError, OSError, RuntimeError):
        return False


def is_rocm_build() -> bool:
    """Whether torch answers through torch.cuda for AMD's devices."""
    return getattr(torch.version, "hip", None) is not None


def _rocm_is_there() -> bool:
    try:
        return is_rocm_build() and bool(torch.cuda.is_available())
    except (AssertionError, OSError, RuntimeError):
        return False


HPU = Unsupported(
    "HPU",
    frozenset({"hpu"}),
    "its streams keep order between each other and copies wait for the device, so a layer's transfer cannot "
    "overlap with compute",
    _hpu_is_there,
)
ROCM = Unsupported(
    "ROCm",
    frozenset({"rocm", "hip"}),
    "lwkv was never tried on it (docs/platforms.md says what is missing)",
    _rocm_is_there,
)
UNSUPPORTED = (HPU, ROCM)
