"""What the connectors ask of a set of kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from lwkv.layouts.paged_layer import PagedLayer


class Rows(NamedTuple):
    """Which rows one scatter or gather moves: three int64 tensors, (T,), on the layer's device.

    `slots[i]` is a row of the paged cache, `block * block_size + offset` (opaque: the block), and
    0 <= slot < num_rows. `k_rows[i]` and `v_rows[i]` are its K and V in the staging buffer, counted in
    `row_bytes` from the buffer's start; `v_rows` is not read where the layer has one part. No slot twice in
    a scatter, no staging row twice in a gather. Whoever makes them leaves tokens without a slot out.
    """

    slots: Tensor
    k_rows: Tensor
    v_rows: Tensor


class Turn(NamedTuple):
    """How keys turn on their way into the cache.

    The first `2 * half` elements of every head turn by an angle of the row's, computed in fp32 (fp64 in
    fp64) and rounded once; the other elements stay as they are.

    Attributes:
        cos, sin: fp32 (angles, half), contiguous, on the layer's device, half <= width / 2. To move a key
            from position p to q: the cosine and sine of (q - p) * frequency.
        angle_of: int64 (T,), there too: for entry i of the rows, its row of `cos` and `sin`.
        interleaved: pairs are elements (2i, 2i + 1); otherwise (i, i + half), as in NeoX and Llama.
    """

    cos: Tensor
    sin: Tensor
    angle_of: Tensor
    interleaved: bool


class StagedLayers(NamedTuple):
    """Layers that share a staging buffer, and the rows that are moved of each.

    Layer i has its staging from byte `i * layer_bytes` on, a multiple of 16 where there are several. With a
    `turn`, which is for scattering, K turns on the way.
    """

    layers: Sequence[PagedLayer]
    staging: Tensor
    layer_bytes: int
    rows: Rows
    turn: Turn | None = None

    def one_by_one(self) -> Iterator[tuple[PagedLayer, Tensor]]:
        """Each layer with its staging."""
        for number, layer in enumerate(self.layers):
            yield layer, self.staging[number * self.layer_bytes :] if number else self.staging


class Kernels(Protocol):
    """Row movement on the current stream, or where `takes_handles` on the one that a `handle` names.

    Nothing here waits for the device or reads it back.

    A call without rows moves nothing, but compiles what its layer needs: worth making at start.

    Staging is uint8, (bytes,), contiguous, on the layer's device, starting at a multiple of 16 bytes or of
    the layer's row_bytes from such an address; it holds pages as `PagedLayer` describes them. Tensors
    must live until the queued work is done.
    """

    name: str
    takes_handles: bool

    def scatter(self, layer: PagedLayer, staging: Tensor, rows: Rows) -> None:
        """Write staging rows into the paged cache."""

    def gather(self, layer: PagedLayer, staging: Tensor, rows: Rows) -> None:
        """Write rows of the paged cache into staging."""

    def prepare(self, layers: Sequence[PagedLayer]) -> None:
        """Make ready for calls that move neighbours among `layers` together, all of one `form`.

        What was prepared before stays ready: a call moves neighbours of one of the sequences.
        """

    def move_layers(self, scatter: bool, staged: StagedLayers, handle: int | None = None) -> None:
        """Scatter or gather neighbours among layers that were prepared, in order; or any single one.

        Args:
            handle: of the stream, where `takes_handles`; None for the current one.

        Raises:
            ValueError: keys are to turn in a layer whose dtype is no float.
        """
