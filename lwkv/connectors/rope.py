"""Turning stored keys to the positions at which they are used again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lwkv.connectors.upload import Uploads
from lwkv.errors import ConfigError, LayoutError
from lwkv.paged_layer import PagedLayer
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


class Turn:
    """Cosines and sines for the shifts of one load, on the device.

    A prompt has few different shifts (one a segment), so only those are computed, in fp64, and each row
    knows its own.

    Args:
        shift: int64 (rows,), each row's new position less its stored one.
    """

    def __init__(self, rope: Rope, shift: Int64s, uploads: Uploads) -> None:
        # A segment's tokens stand together, so only the first of each run is looked at.
        starts = np.append(0, np.flatnonzero(np.diff(shift)) + 1)
        shifts, runs = np.unique(shift[starts], return_inverse=True)
        index = np.repeat(runs.reshape(-1), np.diff(np.append(starts, len(shift))))
        angles = np.outer(shifts, np.asarray(rope.frequencies, np.float64))
        self.interleaved = rope.interleaved
        self._cos = uploads.send(_as_fp32(np.cos(angles)))
        self._sin = uploads.send(_as_fp32(np.sin(angles)))
        self._index = uploads.send(torch.from_numpy(index.astype(np.int64)))

    def of(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of `rows`, int64 (n,), as fp32 (n, half); device work on the current stream."""
        index = self._index[rows]
        return self._cos[index], self._sin[index]


def _as_fp32(values: npt.NDArray[np.float64]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))
