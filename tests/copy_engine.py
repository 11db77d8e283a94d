"""A CPU platform with the two ways of an Intel GPU that cost bytes, or a crash, where they are forgotten.

Copies to the host run on an engine of their own. What the stream does later waits for them; an event that is
recorded behind them does not. The engine is late: it copies when it has to.

And an event that the host has waited for must not be recorded anew: `record` would drop the object that a
thread may still wait on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from lwkv.platforms import CopyBatch
from lwkv.platforms.cpu import CPU
from lwkv.platforms.cpu_stream import CpuEvent, InlineStream, WorkerStream
from lwkv.platforms.xpu import XPU


class CopyEngine(CPU):
    """See above. What says that copies are done is the XPU platform's own."""

    d2h_fence: Any = XPU.d2h_fence

    def __init__(self) -> None:
        super().__init__()
        self._engines: WeakKeyDictionary[WorkerStream, WorkerStream] = WeakKeyDictionary()
        self._waited_for: WeakSet[CpuEvent] = WeakSet()

    def save_batch(self, buffer: torch.Tensor, batch: CopyBatch, stream: Any) -> None:
        super().save_batch(buffer, batch, self._engine_behind(stream))

    def copy_async(self, dst: torch.Tensor, src: torch.Tensor, stream: Any) -> None:
        if self.is_pinned(dst):
            super().copy_async(dst, src, self._engine_behind(stream))
        else:
            self._finish_copies_before(stream)
            super().copy_async(dst, src, stream)

    def load_batch(self, buffer: torch.Tensor, batch: CopyBatch, stream: Any) -> None:
        self._finish_copies_before(stream)
        super().load_batch(buffer, batch, stream)

    def launch(self, stream: Any, work: Callable[[], object]) -> None:
        self._finish_copies_before(stream)
        super().launch(stream, work)

    def record(self, event: CpuEvent, stream: Any) -> None:
        if event in self._waited_for:
            raise AssertionError("an event that the host waited for is recorded anew")
        super().record(event, stream)

    def synchronize_event(self, event: CpuEvent) -> None:
        self._waited_for.add(event)
        super().synchronize_event(event)

    def synchronize_stream(self, stream: Any) -> None:
        super().synchronize_stream(stream)
        if stream in self._engines:
            super().synchronize_stream(self._engines[stream])

    def _engine_behind(self, stream: WorkerStream | InlineStream) -> Any:
        """The engine of a stream, behind all that the stream holds."""
        if isinstance(stream, InlineStream):
            return stream
        if stream not in self._engines:
            self._engines[stream] = self.new_stream(stream.device, late=True)
        self._engines[stream].wait(stream.mark())
        return self._engines[stream]

    def _finish_copies_before(self, stream: Any) -> None:
        """Let what is queued on the stream from here on wait for its copies."""
        if stream in self._engines:
            stream.wait(self._engines[stream].mark())
