"""Intel GPUs through torch.xpu.

Checked against API signatures and a simulated device; not run on hardware.
"""

from __future__ import annotations

import torch

from lwkv.platforms.accelerator import Accelerator
from lwkv.platforms.protocol import Event, Stream


class XPU(Accelerator):
    """torch.xpu has no default stream, no batched copy and no way to page-lock existing memory."""

    name = device_type = "xpu"
    how_to_get = (
        "install torch from https://download.pytorch.org/whl/xpu (the builds on PyPI have no XPU support) "
        "and Intel's GPU driver"
    )
    handle_attribute = "sycl_queue"
    event_options = frozenset({"enable_timing"})

    def new_stream(self, device: torch.device, high_priority: bool = False) -> Stream:
        stream = super().new_stream(device, high_priority)
        # The pool's streams include the one a thread starts with.
        return super().new_stream(device, high_priority) if stream == self.current_stream(device) else stream

    def elapsed_ms(self, start: Event, end: Event) -> float | None:
        try:
            return super().elapsed_ms(start, end)
        except RuntimeError:  # SYCL compilers before 2025.0 cannot time queues
            return None

    def d2h_fence(self, stream: Stream, event: Event, waiter: Stream | None = None) -> None:
        # A copy engine may run behind the barrier that an event stands for (pytorch/pytorch#189980). Neither
        # the host nor another stream may trust it; no release of torch or the driver is known to be mended.
        self.synchronize_stream(stream)
