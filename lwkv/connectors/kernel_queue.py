"""Queueing a kernel on a stream."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from lwkv.connectors.caches import Caches
from lwkv.connectors.plan import Plan
from lwkv.kernels import Kernels, Rows
from lwkv.paged_layer import PagedLayer
from lwkv.platforms import Stream


class KernelQueue(Caches):
    """What both sides of a connector have: kernels, and how they get to a stream."""

    kernels: Kernels

    def _queue_move(
        self,
        stream: Stream,
        plan: Plan,
        layers: Sequence[PagedLayer],
        staging: torch.Tensor,
        rows: Rows,
        *,
        scatter: bool,
    ) -> None:
        """Queue what scatters rows of layers that share their staging, or gathers them."""
        arguments = scatter, layers, staging, plan.layer_bytes(layers[0]), rows
        handle = self.platform.launch_handle(stream) if self.kernels.takes_handles else None
        if handle is None:
            self.platform.launch(stream, partial(self.kernels.move_layers, *arguments))
        else:
            # To make the stream the current one and back takes longer than the launch.
            self.kernels.move_layers(*arguments, handle)
