"""The copies of raw pages that are in the pool beside their coded ones."""

from __future__ import annotations

import numpy as np

from lwkv.platforms import CopyBatch, Int64s
from lwkv.pool.host_pool import HostPool


def spill_batch(pool: HostPool, on_device: Int64s, spill: Int64s, num_bytes: int) -> CopyBatch:
    """Copies of `num_bytes` bytes each, one behind the other in the pages of a row of `spill`.

    Args:
        on_device: where each begins in the device's buffer, int64 (copies,). spill: int64 (copies, pages).
    """
    slabs, inside = pool.slabs, np.arange(spill.shape[1]) * pool.page_bytes
    slab_of, place = np.divmod(spill.ravel(), slabs.span)
    offsets = place * slabs.page_stride
    return CopyBatch(
        slabs.memory,
        slab_of,
        offsets,
        slabs.bases[slab_of] + offsets,
        (on_device[:, None] + inside).ravel(),
        np.tile(np.minimum(num_bytes - inside, pool.page_bytes), len(spill)),
        stable=True,
    )
