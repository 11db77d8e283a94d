"""Moore Threads GPUs through torch_musa.

Checked against API signatures and a simulated device; not run on hardware.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from lwkv.platforms.accelerator import ABSENT, Accelerator
from lwkv.platforms.protocol import Features

_PORTABLE = 1  # page-locked for every device, not only the current one


class MUSA(Accelerator):
    """Blending has not been shown to work here, so `features.blending` is off."""

    name = device_type = "musa"
    how_to_get = (
        "torch_musa is not on PyPI: install the matching pair of torch and torch_musa wheels from "
        "https://github.com/MooreThreads/torch_musa/releases, or use the vendor's container"
    )
    handle_attribute = "musa_stream"

    def probe_features(self) -> Features:
        return replace(super().probe_features(), blending=False, host_register=self._can_register())

    def register_range(self, address: int, nbytes: int, device: int) -> bool:
        return int(self.module.musart().musaHostRegister(address, nbytes, _PORTABLE)) == 0

    def unregister_range(self, address: int, device: int) -> None:
        with self._device(device):
            result = int(self.module.musart().musaHostUnregister(address))
        if result:
            raise RuntimeError(f"musaHostUnregister failed ({result})")

    @contextmanager
    def _device(self, device: int) -> Iterator[None]:
        """Make `device` the thread's inside; where it is, leave it: to set a device makes a context on it."""
        before = self.module.current_device()
        if before == device:
            yield
            return
        self.module.set_device(device)
        try:
            yield
        finally:
            self.module.set_device(before)

    def _can_register(self) -> bool:
        try:
            return hasattr(self.module.musart(), "musaHostRegister")
        except ABSENT:
            return False
