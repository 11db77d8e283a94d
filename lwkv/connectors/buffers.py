"""Device memory for one layer's rows, contiguous, in the form of a paged cache with blocks of one row."""

from __future__ import annotations

import torch

from lwkv.layouts.paged_layer import PagedLayer

# K fills a multiple of 16 bytes then: V is aligned as K is, and kernels are the same for any number of rows.
ROWS_TOGETHER = 16


@torch.inference_mode(False)
def new_buffer(like: PagedLayer, num_rows: int) -> PagedLayer:
    """Allocate on the current stream: [rows, 1, heads, width] in K and V, `num_rows` rows or a few more."""
    rows = -(-num_rows // ROWS_TOGETHER) * ROWS_TOGETHER
    shape = (like.parts, rows, 1, like.heads, like.width)
    memory = torch.empty(shape, dtype=like.k.dtype, device=like.device)
    return PagedLayer("buffer", like.dtype, memory[0], None if like.v is None else memory[1])


def memory_of(buffer: PagedLayer) -> torch.Tensor:
    """All bytes of a buffer, uint8 (bytes,): its K rows and then its V rows."""
    k = buffer.k
    return k.as_strided((buffer.parts * k.numel(),), (1,)).view(torch.uint8)
