"""The place in a device's work behind what SGLang has queued."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from lwkv.platforms import Platform, Stream


class ModelStreams:
    """The streams that SGLang works on.

    It prepares a batch on the current stream while another one computes the batch before, which may still
    use the slots that the next one gets, or fill the pages that are to be kept.

    Args:
        forward_stream: the one that models compute on, in any form; None for the current one.
    """

    def __init__(self, platform: Platform, device: torch.device, forward_stream: Any = None) -> None:
        self.platform = platform
        self.device = device
        self._forward = None if forward_stream is None else platform.as_native(forward_stream, device)

    def let_wait(self, stream: Stream) -> None:
        """Make `stream` wait on the device for all that the current stream and the models' one hold now."""
        self._let_wait_for_current(stream)
        if self._forward is not None:
            self._let_wait_for_forward(stream)

    def _let_wait_for_current(self, stream: Stream) -> None:
        # It makes the slots, and may free and clear them.
        self.platform.wait_stream(stream, self.platform.current_stream(self.device))

    def _let_wait_for_forward(self, stream: Stream) -> None:
        # The batch before may still read slots that are loaded to, or write pages that are stored.
        self.platform.wait_stream(stream, self._forward)


class Order:
    """A stream of no work of its own: what it waits for comes before what lwkv does next."""

    def __init__(self, streams: ModelStreams) -> None:
        self._streams = streams
        self._stream = streams.platform.new_stream(streams.device)

    def catch_up(self) -> None:
        """Wait on the device for all that SGLang's streams hold now."""
        self._streams.let_wait(self._stream)

    def use(self) -> AbstractContextManager[None]:
        """Make the stream the current one inside the block."""
        return self._streams.platform.use_stream(self._stream)
