"""What is read of a chunk in one call where its layers are not waited for one by one."""

from __future__ import annotations

import numpy as np

from lwkv.platforms.protocol import Int64s

BYTES_A_READ = 8 << 20
"""About so much is read in one call: enough that a call is worth its cost, and little enough that several
read a chunk beside each other."""


def parts_of_chunk(num_layers: int, page_stride: int) -> list[Int64s]:
    """The layers of a chunk, int64, in groups of neighbours of about BYTES_A_READ.

    Args:
        page_stride: bytes of a page in memory.
    """
    size = max(1, BYTES_A_READ // page_stride)
    return np.split(np.arange(num_layers), range(size, num_layers, size))
