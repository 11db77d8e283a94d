"""Turning stored keys to the positions at which they are used again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lwkv.connectors.row_tables import RowTables
from lwkv.errors import ConfigError, LayoutError
from lwkv.kernels import Turn
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.platforms.protocol import Int64s


@dataclass(frozen=True, slots=True)
class Rope:
    """How a model turns its keys: RoPE (Su et al., arXiv 2104.09864) with the frequencies it really uses.

    Args:
        frequencies: radians a position, one for each pair of elements, after any scaling (Llama-3, YaRN).
            YaRN's factor on the magnitude is in the stored keys already and does not belong here.
        interleaved: pairs are elements (2i, 2i + 1); otherwise (i, i + half), as in NeoX and Llama.

    Raises:
        ConfigError: no frequency, or one that is not finite.
    """

    frequencies: tuple[float, ...]
    interleaved: bool = False

    def __post_init__(self) -> None:
        if not self.frequencies or not np.isfinite(self.frequencies).all():
            raise ConfigError(f"rope frequencies must be finite and at least one, got {self.frequencies}")

    def check(self, layer: PagedLayer) -> None:
        """Raise LayoutError, naming the layer, where its keys cannot be turned."""
        turned = 2 * len(self.frequencies)
        if layer.v is None:
            problem = "is MLA, where the part that RoPE turns is not at the front of the row"
        elif not layer.dtype.is_floating_point:
            problem = f"is {layer.dtype}: register the caches with the float type that their bytes are"
        elif turned > layer.width:
            problem = f"has heads of {layer.width} elements, but the rope turns {turned}"
        else:
            return
        raise LayoutError(f"layer {layer.name!r} {problem}; its keys cannot move to other positions")


class Turning:
    """Cosines and sines for the shifts of one load, on the device, and which of them each row turns by.

    A prompt has few different shifts (one a segment), so only those are computed, in fp64.

    Args:
        shift: int64 (rows,), each row's new position less its stored one.
    """

    def __init__(self, rope: Rope, shift: Int64s, uploads: RowTables) -> None:
        # A segment's tokens stand together, so only the first of each run is looked at.
        starts = np.append(0, np.flatnonzero(np.diff(shift)) + 1)
        shifts, runs = np.unique(shift[starts], return_inverse=True)
        self._angle_of = np.repeat(runs.reshape(-1), np.diff(np.append(starts, len(shift))))
        self._interleaved, self._uploads = rope.interleaved, uploads
        angles = np.outer(shifts, np.asarray(rope.frequencies, np.float64))
        # One by one: kernels are compiled for tables that begin at a multiple of 16 bytes.
        tables = np.cos(angles), np.sin(angles)
        self._cos, self._sin = (uploads.send(table.astype(np.float32)) for table in tables)

    def of(self, rows: Int64s) -> Turn:
        """What turns `rows`, int64 (n,), not none; a table of theirs is on its way to the device."""
        angle_of = self._uploads.send(self._angle_of[rows])
        return Turn(self._cos, self._sin, angle_of, self._interleaved)
