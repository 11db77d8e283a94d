"""A load that stops over in the buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from lwkv.connectors.loader import Load
from lwkv.connectors.plan import Plan
from lwkv.connectors.rope import Turn
from lwkv.paged_layer import PagedLayer
from lwkv.platforms import Stream
from lwkv.platforms.protocol import Int64s
from lwkv.transfer import NO_SLOT


@dataclass(slots=True, eq=False)
class BufferedLoad(Load):
    """A load into the buffer. Layer i is in `buffers[i % len(buffers)]`.

    Attributes:
        buffers: see `lwkv.connectors.buffers`; a row for every token that is moved.
        num_rows: tokens that are moved.
        rows_of: int64 (tokens,), the buffer row of each token of the plan's transfer, NO_SLOT for none.
        places: the same for the moved tokens only, on the device.
        filled: for each queued layer, the plan and the places it was queued with: they are on the device by
            the time the layer is, whatever has been dropped since.
        num_flushed: layers that have been waited for and flushed.
        user: the stream that was last given the buffer to work on, or flushed it.
    """

    buffers: Sequence[PagedLayer] = ()
    num_rows: int = 0
    rows_of: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    places: torch.Tensor | None = None
    turn: Turn | None = None
    filled: list[tuple[Plan, torch.Tensor | None]] = field(default_factory=list)
    num_flushed: int = 0
    user: Stream = None

    def buffer(self, layer: int) -> PagedLayer:
        """Where `layer` is, or will be."""
        return self.buffers[layer % len(self.buffers)]


def as_buffered(load: Load) -> BufferedLoad:
    """Raise TypeError for a load of another connector."""
    if not isinstance(load, BufferedLoad):
        raise TypeError(f"{load!r} was not begun by a BufferConnector")
    return load


def send_places(plan: Plan, rows_of: Int64s) -> torch.Tensor | None:
    """The buffer rows of moved tokens, int64 (rows,), on the device; None where there are none."""
    places = rows_of[rows_of != NO_SLOT]
    return plan.uploads.send(torch.from_numpy(places)) if len(places) else None
