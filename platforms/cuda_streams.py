"""torch.cuda's current device and stream, asked without the checks that its Python functions make first.

Those cost the host 4 us a call, several times a layer. They matter before the first use of a device only,
and whoever has a stream is past that.
"""

from __future__ import annotations

from typing import Any

import torch

from lwkv.platforms.protocol import Stream

_CALLS = ("_cuda_getDevice", "_cuda_getCurrentStream", "_cuda_setStream")


class CudaStreams:
    """The part of torch.cuda that a StreamSwitch uses, on torch's C functions."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int], Stream] = {}
        self._get_device, self._get_stream, self._set_stream = (getattr(torch._C, name) for name in _CALLS)

    @staticmethod
    def are_there() -> bool:
        """Whether this build of torch has the C functions."""
        return all(hasattr(torch._C, name) for name in _CALLS)

    def current_device(self) -> int:
        return int(self._get_device())

    def current_stream(self, index: int) -> Stream:
        ids: tuple[int, int, int] = self._get_stream(index)
        stream = self._known.get(ids)
        if stream is None:
            stream = self._known[ids] = torch.cuda.current_stream(index)
        return stream

    def set_stream(self, stream: Any) -> None:
        self._set_stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )
