"""A load that stops over in the buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from lwkv.connectors.loader import Load
from lwkv.connectors.plan import Plan, Slice
from lwkv.connectors.rope import Turn
from lwkv.kernels import Rows
from lwkv.paged_layer import PagedLayer
from lwkv.platforms import Stream
from lwkv.platforms.protocol import Int64s
from lwkv.transfer import NO_SLOT


@dataclass(frozen=True, slots=True)
class Stopover:
    """How one slice's rows come into a buffer and go on from there: the same in every layer.

    Attributes:
        fill, empty: from staging into a buffer, and from a buffer into the blocks; in place, `fill` is all.
        angles: cosines and sines by which the keys of these rows are turned; None where they are not.
    """

    part: Slice
    fill: Rows
    empty: Rows
    angles: tuple[torch.Tensor, torch.Tensor] | None

    @classmethod
    def of(cls, part: Slice, places: torch.Tensor, load: BufferedLoad) -> Stopover:
        """Work it out on the current stream; `places` are those of all rows of the plan."""
        place, rows = places[part.first_row : part.last_row], part.rows
        return cls(
            part,
            rows if load.in_place else Rows(place, rows.k_rows, rows.v_rows),
            rows if load.in_place else Rows(rows.slots, place, place + load.buffer(0).num_rows),
            None if load.turn is None else load.turn.of(place),
        )


@dataclass(slots=True, eq=False)
class BufferedLoad(Load):
    """A load into the buffer, or past it. Layer i is in `buffers[i % len(buffers)]`.

    Attributes:
        in_place: whether layers go straight to their blocks, and the buffer is nothing but these.
        buffers: see `lwkv.connectors.buffers`; a row for every token that is moved.
        num_rows: tokens that are moved.
        rows_of: int64 (tokens,), the buffer row of each token of the plan's transfer, NO_SLOT for none.
        places: the same for the moved tokens only, on the device.
        stopovers: of each slice that some layer was filled with, by the slice's id.
        filled: for each queued layer, the plan and the places it was queued with: they are on the device by
            the time the layer is, whatever has been dropped since.
        num_flushed: layers that have been waited for and flushed.
        user: the stream that was last given the buffer to work on, or flushed it.
    """

    in_place: bool = False
    buffers: Sequence[PagedLayer] = ()
    num_rows: int = 0
    rows_of: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    places: torch.Tensor | None = None
    turn: Turn | None = None
    stopovers: dict[int, Stopover] = field(default_factory=dict)
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
