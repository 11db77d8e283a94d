"""A worker's half of blending in vLLM, taken apart: what it loads, and what it computes, each alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Computing(NamedTuple):
    """A blend, loads in place: milliseconds to the end, and to the last launch; rows of all layers."""

    ms: float
    queued_ms: float
    row_layers: int


class Parts:
    """For the process of an engine, between two of its steps."""

    def __init__(self) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._worker: Any = get_kv_transfer_group()._worker._blending

    def select(self, selector: Any, share: float) -> None:
        """Have it choose in another way from now on, and always this share of the tokens."""
        self._worker.selector, self._worker.share, self._worker.controlled = selector, share, None

    def flush(self) -> bool:
        """Wait until all that was stored can be found."""
        return bool(self._worker._segments.engine.flush())

    def counts(self) -> dict[str, float]:
        """The engine's counters of blending."""
        stats: dict[str, float] = self._worker._segments.engine.stats()
        return {name: count for name, count in stats.items() if name.startswith("blend_")}

    def next_order(self, ask: Callable[[], object]) -> Any:
        """The order of the prompt that `ask` has blended."""
        orders: list[Any] = []
        parts = self._worker._parts

        def note(order: Any, loads: Any) -> Any:
            orders.append(order)
            return parts(order, loads)

        self._worker._parts = note
        ask()
        self._worker._parts = parts
        (order,) = orders
        return order

    def load_ms(self, order: Any) -> float:
        """All loads of a blend, with nothing computed."""
        segments = self._worker._segments
        _synchronize()
        begin = time.perf_counter()
        retrieval = segments.retrieval(self._worker._loads(order))
        retrieval.hold()
        retrieval.open()
        retrieval.finish()
        _synchronize()
        return 1e3 * (time.perf_counter() - begin)

    @contextmanager
    def loads_in_place(self) -> Iterator[None]:
        """Blends that load nothing, as if all that they reuse were in its blocks; answers mean nothing."""
        worker = self._worker
        parts = worker._parts

        def compute(order: Any, loads: Any) -> Generator[float | None, None, bool]:
            yield from worker._pass(order, self._reuse(order, loads), worker.share).parts(lambda _: None)
            return True

        worker._parts = compute
        try:
            yield
        finally:
            worker._parts = parts

    def _reuse(self, order: Any, loads: Any) -> Any:
        from lwkv.blend.segment_cache import lay_out
        from lwkv.integrations.vllm.blending.worker.side import _computed

        with_counts = [load.num_tokens - load.request.first for load in loads]
        return lay_out(_computed(order), loads, with_counts)

    def compute(self, order: Any) -> Computing:
        """A blend whose loads are in place."""
        worker = self._worker
        reuse = self._reuse(order, worker._loads(order))
        _synchronize()
        begin = time.perf_counter()
        with worker._calling():
            computed = _to_end(worker._pass(order, reuse, worker.share).parts(lambda _: None))
        queued = time.perf_counter()
        _synchronize()
        return Computing(
            1e3 * (time.perf_counter() - begin), 1e3 * (queued - begin), int(computed.row_layers)
        )


def _to_end(parts: Generator[object, None, T]) -> T:
    """Run all parts, and give what comes of them."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            result: T = end.value
            return result


def _synchronize() -> None:
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
