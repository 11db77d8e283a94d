"""A load that stops over in the buffer, or whose keys turn on their way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from lwkv.connectors.loader import Load
from lwkv.connectors.rope import Turning
from lwkv.connectors.transfer_plan import Plan, Slice
from lwkv.kernels import Rows, Turn
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.platforms import Stream
from lwkv.platforms.protocol import Int64s
from lwkv.transfer import NO_SLOT


@dataclass(slots=True, eq=False)
class BufferedLoad(Load):
    """A load into the buffer, or past it. Layer i is in `buffers[i % len(buffers)]`.

    Attributes:
        in_place: whether layers go straight to their blocks, and there is no buffer.
        buffers: see `lwkv.connectors.buffers`; a row for every token that is moved.
        num_rows: tokens that are moved.
        rows_of: int64 (tokens,), the buffer row of each token of the plan's transfer, NO_SLOT for none.
        turning: what turns keys; None where they stay as they are.
        places: the buffer rows of the tokens that are left, int64 (rows,), on the device.
        turn: what turns the keys of these.
        filled: for each layer in the buffer, the plan and the places it was queued with: they are on the
            device by the time the layer is, whatever has been dropped since.
        num_flushed: layers that have been waited for and flushed.
        user: the stream that was last given the buffer to work on, or flushed it.
        model_is_ahead: whether the model has something to compute before it reads the first layer.
    """

    in_place: bool = False
    buffers: Sequence[PagedLayer] = ()
    num_rows: int = 0
    rows_of: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    turning: Turning | None = None
    places: torch.Tensor | None = None
    turn: Turn | None = None
    filled: list[tuple[Plan, torch.Tensor | None]] = field(default_factory=list)
    num_flushed: int = 0
    user: Stream = None
    model_is_ahead: bool = False

    def buffer(self, layer: int) -> PagedLayer:
        """Where `layer` is, or will be."""
        return self.buffers[layer % len(self.buffers)]

    def send_tables(self) -> None:
        """Have the tables of the rows that are left on the device by the time that kernels get there."""
        rows = self.rows_of[self.rows_of != NO_SLOT]
        self.places = self.turn = None
        if len(rows) and not self.in_place:
            self.places = self.plan.uploads.send(torch.from_numpy(rows))
        if len(rows) and self.turning is not None:
            self.turn = self.turning.of(rows)

    def arrival(self, part: Slice) -> Rows:
        """How a slice's rows come to where they are loaded to."""
        if self.places is None:
            return part.rows
        return Rows(self.places[part.first_row : part.last_row], part.rows.k_rows, part.rows.v_rows)

    def turn_of(self, part: Slice) -> Turn | None:
        """What turns a slice's keys."""
        if self.turn is None:
            return None
        return self.turn._replace(angle_of=self.turn.angle_of[part.first_row : part.last_row])


def as_buffered(load: Load) -> BufferedLoad:
    """Raise TypeError for a load of another connector."""
    if not isinstance(load, BufferedLoad):
        raise TypeError(f"{load!r} was not begun by a BufferConnector")
    return load
