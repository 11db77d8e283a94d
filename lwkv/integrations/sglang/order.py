"""The place in a device's work behind what SGLang has queued."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from lwkv.platforms import Platform


class Order:
    """A stream of no work of its own: what it waits for comes before what lwkv does next.

    SGLang prepares a batch on the current stream while another one computes the batch before, which may still
    use the slots that the next one gets, or fill the pages that are to be kept.

    Args:
        forward_stream: the one that models compute on, in any form; None for the current one.
    """

    def __init__(self, platform: Platform, device: torch.device, forward_stream: Any = None) -> None:
        self._platform = platform
        self._device = device
        self._stream = platform.new_stream(device)
        self._forward = None if forward_stream is None else platform.as_native(forward_stream, device)

    def catch_up(self) -> None:
        """Wait on the device for all that the current stream and the models' stream hold now."""
        self._wait_for_current()
        if self._forward is not None:
            self._wait_for_forward()

    def use(self) -> AbstractContextManager[None]:
        """Make the stream the current one inside the block."""
        return self._platform.use_stream(self._stream)

    def _wait_for_current(self) -> None:
        # It makes the slots, and may free and clear them.
        self._platform.wait_stream(self._stream, self._platform.current_stream(self._device))

    def _wait_for_forward(self) -> None:
        # The batch before may still read slots that are loaded to, or write pages that are stored.
        self._platform.wait_stream(self._stream, self._forward)
