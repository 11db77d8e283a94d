"""Whether Triton's kernels run on a device type.

That the package is there says little: one built for another vendor imports, and fails at the first launch.
"""

from __future__ import annotations

import logging
import subprocess
from importlib import import_module
from importlib.util import find_spec
from typing import Any

log = logging.getLogger(__name__)

# What a driver that finds no device, no compiler or another release of its own parts raises.
_UNUSABLE = (AssertionError, AttributeError, ImportError, OSError, RuntimeError, subprocess.SubprocessError)


def triton_serves(device_type: str) -> bool:
    """Whether the installed Triton's active driver is for `device_type`; logs why not."""
    if find_spec("triton") is None:
        log.info("kernels on %s are plain torch: triton is not installed", device_type)
        return False
    try:
        # Vendors name the target as torch names the device, but for AMD, which answers to torch.cuda.
        target: Any = import_module("triton.runtime.driver").driver.active.get_current_target()
    except _UNUSABLE as error:
        log.warning("kernels on %s are plain torch: triton's driver cannot be used: %s", device_type, error)
        return False
    if target.backend != device_type:
        log.warning(
            "kernels on %s are plain torch: the installed triton is for %s", device_type, target.backend
        )
        return False
    log.info("kernels on %s are Triton's", device_type)
    return True
