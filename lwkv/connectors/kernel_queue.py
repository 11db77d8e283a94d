"""Queueing a kernel on a stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from lwkv.connectors.caches import Caches
from lwkv.kernels import Kernels, Rows
from lwkv.paged_layer import PagedLayer
from lwkv.platforms import Stream


class KernelQueue(Caches):
    """What both sides of a connector have: kernels, and how they get to a stream."""

    kernels: Kernels

    def _queue_kernel(
        self,
        stream: Stream,
        kernel: Callable[..., None],
        layer: PagedLayer,
        staging: torch.Tensor,
        rows: Rows,
    ) -> None:
        handle = self.platform.launch_handle(stream) if self.kernels.takes_handles else None
        if handle is None:
            self.platform.launch(stream, partial(kernel, layer, staging, rows))
        else:
            # To make the stream the current one and back takes longer than the launch.
            kernel(layer, staging, rows, handle)
