"""What every platform checks before it copies."""

from __future__ import annotations

import numpy as np
import torch

from lwkv.platforms.protocol import CopyBatch, Int64s


def check_copy(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Raise ValueError unless the two tensors are packed and alike: then a copy is one move of bytes."""
    if dst.shape != src.shape or dst.dtype != src.dtype:
        raise ValueError(
            f"copy of {src.dtype} {tuple(src.shape)} into {dst.dtype} {tuple(dst.shape)}: "
            "shape and dtype must be equal, convert before copying"
        )
    if not (dst.is_contiguous() and src.is_contiguous()):
        raise ValueError(
            f"copy from strides {src.stride()} to {dst.stride()}: both sides must be packed, "
            "gather into a packed tensor first"
        )


def check_buffer(buffer: torch.Tensor) -> None:
    """Raise ValueError unless `buffer` is packed bytes."""
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError(
            f"buffer is {buffer.dtype} {tuple(buffer.shape)} with strides {buffer.stride()}; "
            "give it as packed uint8 (bytes,)"
        )


def check_runs(buffer: torch.Tensor, batch: CopyBatch) -> None:
    """Raise ValueError unless every run lies inside its slab and the buffer, where its address says."""
    for name in ("slab_of", "host_offsets", "host_addresses", "device_offsets", "sizes"):
        _check_array(name, getattr(batch, name), batch.sizes.size)
    starts = np.fromiter((slab.data_ptr() for slab in batch.slabs), np.int64, len(batch.slabs))
    lengths = np.fromiter((slab.numel() for slab in batch.slabs), np.int64, len(batch.slabs))
    wrong = starts[batch.slab_of] + batch.host_offsets != batch.host_addresses
    wrong |= (batch.sizes <= 0) | (batch.host_offsets < 0) | (batch.device_offsets < 0)
    wrong |= batch.host_offsets + batch.sizes > lengths[batch.slab_of]
    wrong |= batch.device_offsets + batch.sizes > buffer.numel()
    if wrong.any():
        raise ValueError(_describe(buffer, batch, int(np.flatnonzero(wrong)[0])))


def _check_array(name: str, array: Int64s, num_runs: int) -> None:
    if array.dtype != np.int64 or array.shape != (num_runs,) or not array.flags.c_contiguous:
        raise ValueError(
            f"CopyBatch.{name} is {array.dtype} {array.shape} with strides {array.strides}; "
            f"give it as packed int64 ({num_runs},)"
        )


def _describe(buffer: torch.Tensor, batch: CopyBatch, run: int) -> str:
    slab = batch.slabs[int(batch.slab_of[run])]
    return (
        f"run {run} is {batch.sizes[run]} bytes at {batch.host_offsets[run]} of a slab of {slab.numel()} "
        f"(address {batch.host_addresses[run]:#x}, slab at {slab.data_ptr():#x}) and at "
        f"{batch.device_offsets[run]} of a buffer of {buffer.numel()}; keep it positive and inside both"
    )
