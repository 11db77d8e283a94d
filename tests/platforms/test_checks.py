"""What is checked before bytes are copied."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lwkv.platforms import CopyBatch
from lwkv.platforms.checks import check_runs

ARRAYS = ["slab_of", "host_offsets", "host_addresses", "device_offsets", "sizes"]


def make_batch(slab: torch.Tensor) -> CopyBatch:
    """Three runs of 4 bytes, 9 apart on the host and 7 apart in the buffer."""
    zeros, steps = np.zeros(3, np.int64), np.arange(3)
    return CopyBatch([slab], zeros, steps * 9, steps * 9 + slab.data_ptr(), steps * 7, zeros + 4)


def test_runs_inside_their_slab_and_buffer_pass() -> None:
    check_runs(torch.zeros(18, dtype=torch.uint8), make_batch(torch.zeros(22, dtype=torch.uint8)))


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_that_a_driver_cannot_read_are_refused(name: str) -> None:
    buffer, batch = torch.zeros(18, dtype=torch.uint8), make_batch(torch.zeros(22, dtype=torch.uint8))
    good = getattr(batch, name)
    for bad in (good.astype(np.int32), np.repeat(good, 2)[::2], np.append(good, 0), good[:, None]):
        with pytest.raises(ValueError, match=r"CopyBatch\..* packed int64"):
            check_runs(buffer, batch._replace(**{name: bad}))


def test_the_array_that_is_wrong_is_named() -> None:
    batch = make_batch(torch.zeros(22, dtype=torch.uint8))
    for name in ARRAYS:
        bad = batch._replace(**{name: getattr(batch, name).astype(np.int32)})
        with pytest.raises(ValueError, match=rf"CopyBatch\.{name} is int32 \(3,\).*packed int64 \(3,\)"):
            check_runs(torch.zeros(18, dtype=torch.uint8), bad)


def test_a_run_that_leaves_its_slab_or_buffer_is_named() -> None:
    slab = torch.zeros(22, dtype=torch.uint8)
    with pytest.raises(
        ValueError, match=r"run 2 is 4 bytes at 18 of a slab of 22 .* at 14 of a buffer of 17"
    ):
        check_runs(torch.zeros(17, dtype=torch.uint8), make_batch(slab))
    with pytest.raises(ValueError, match="run 2 is 4 bytes at 18 of a slab of 21 "):
        check_runs(torch.zeros(18, dtype=torch.uint8), make_batch(slab[:21]))
