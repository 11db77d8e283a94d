"""Moving rows between a paged cache and a staging buffer, on the device."""

from __future__ import annotations

from lwkv.kernels.protocol import Kernels, Rows, StagedLayers, Turn
from lwkv.kernels.torch_kernels import TorchKernels
from lwkv.platforms import Platform

__all__ = ["Kernels", "Rows", "StagedLayers", "TorchKernels", "Turn", "choose_kernels"]


def choose_kernels(platform: Platform) -> Kernels:
    """Give Triton's kernels where the platform's features have Triton, plain torch elsewhere."""
    if not platform.features.triton:
        return TorchKernels()
    from lwkv.kernels.triton.kernels import TritonKernels

    return TritonKernels()
