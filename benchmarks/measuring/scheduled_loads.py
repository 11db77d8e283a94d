"""Loads as vLLM's workers do them: keys are known, and chunks in a node's memory are promised before."""

from __future__ import annotations

import time

import numpy as np

from lwkv.benchmarks.measuring.measured_engine import MeasuredEngine, Slots
from lwkv.pipeline.generators import retrieve_steps
from lwkv.request import KeyedSlots
from lwkv.shared_host.client.promises import OwnerPromises, Promised
from lwkv.shared_host.client.tier import NodeTier
from lwkv.storage import Chunk

TIMEOUT_S = 5.0


class ScheduledLoads:
    """Loads of `tokens`, which are cached, into the target slots of an engine.

    Args:
        socket: of the owner whose memory the engine uses; empty for memory of its own.

    Attributes:
        promise_ms: how long each look-up took that promised the chunks, and gave them.
    """

    def __init__(self, measured: MeasuredEngine, tokens: Slots, socket: str) -> None:
        self._measured = measured
        size = measured.engine.config.chunk_size
        self._keys = measured.engine.keys(tokens)[: len(tokens) // size]
        slots = np.ascontiguousarray(measured.target[: len(self._keys) * size], np.int64)
        self._request = KeyedSlots(self._keys, slots)
        host = measured.engine.parts().storage.host
        self._node = host if isinstance(host, NodeTier) else None
        self._owner = OwnerPromises(socket, TIMEOUT_S) if socket else None
        self._promised: Promised | None = None
        self.promise_ms: list[float] = []

    def prepare(self) -> None:
        """Clear the target, give back what the last load had, and have the chunks promised."""
        self._measured.clear_target()
        self._measured.flush()
        if self._owner is None or self._node is None:
            return
        begun = time.perf_counter()
        promise = self._owner.promise(0, [(self._node.name, self._keys)])
        if promise is None or not self._owner.give(promise, 0, len(self._keys)):
            raise RuntimeError("the owner of host memory does not answer")
        self.promise_ms.append(1e3 * (time.perf_counter() - begun))
        (self._promised,) = promise.promised

    def load(self) -> None:
        """Load all layers, behind the current stream's work."""
        chunks: list[Chunk | None] | None = None
        if self._node is not None and self._promised is not None:
            chunks, self._promised = self._node.take_over(self._promised), None
        batch = self._measured.engine.retrieval([self._request], pinned=[chunks])
        for _ in retrieve_steps(batch, list):
            pass

    def close(self) -> None:
        if self._owner is not None:
            self._owner.close()
