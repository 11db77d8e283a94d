"""Queueing a kernel on a stream."""

from __future__ import annotations

from functools import partial

from lwkv.connectors.caches import Caches
from lwkv.kernels import Kernels, Sharing
from lwkv.platforms import Stream


class KernelQueue(Caches):
    """What both sides of a connector have: kernels, and how they get to a stream."""

    kernels: Kernels

    def _queue_move(self, stream: Stream, sharing: Sharing, *, scatter: bool) -> None:
        """Queue what scatters the rows of layers that share their staging, or gathers them."""
        handle = self.platform.launch_handle(stream) if self.kernels.takes_handles else None
        if handle is None:
            self.platform.launch(stream, partial(self.kernels.move_layers, scatter, sharing))
        else:
            # To make the stream the current one and back takes longer than the launch.
            self.kernels.move_layers(scatter, sharing, handle)
