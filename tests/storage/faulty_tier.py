"""A tier whose n-th call can be made to go wrong; in memory, or around another one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lwkv.keys import ChunkKey, LayerKey
from lwkv.storage import Status, Tier

LONG_S = 20.0


@dataclass
class Fault:
    """What happens in one call: it waits for `gate`, then raises `error`, or does its work and returns what
    `answer` makes of it. With `drop` it says that all went well and does nothing; with `before` it does that
    first, with the pages."""

    error: BaseException | None = None
    gate: threading.Event | None = None
    answer: Callable[[list[Any]], Any] = lambda answers: answers
    drop: bool = False
    before: Callable[[Sequence[torch.Tensor]], object] = lambda pages: None
    entered: threading.Event = field(default_factory=threading.Event)


def hanging() -> Fault:
    return Fault(gate=threading.Event())


class MemoryPages:
    """A tier in a dictionary."""

    def __init__(self) -> None:
        self.name = "memory"
        self.pages: dict[LayerKey, torch.Tensor] = {}
        self._closed = False

    def contains(self, keys: Sequence[ChunkKey], deadline_s: float) -> list[bool]:
        return [LayerKey(key, 0) in self.pages for key in keys]

    def get(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor], deadline_s: float) -> list[Status]:
        return [self._fill(key, page) for key, page in zip(keys, pages, strict=True)]

    def put(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor], deadline_s: float) -> list[Status]:
        if not self._closed:
            self.pages |= {key: page.clone() for key, page in zip(keys, pages, strict=True)}
        return [Status.ERROR if self._closed else Status.OK] * len(keys)

    def close(self) -> None:
        self._closed = True
        self.pages.clear()

    def _fill(self, key: LayerKey, page: torch.Tensor) -> Status:
        if key not in self.pages:
            return Status.MISS
        page.copy_(self.pages[key])
        return Status.OK


class FaultyTier:
    """`faults[name, n]` is what happens in the n-th call, from 0, of the method of that name; `faults[name]`
    in every other. `calls` has the keys of each call. Around a tier of its own in memory, whose pages are
    `pages` and stay when it is closed, or around `inner`."""

    def __init__(self, name: str = "faulty", inner: Tier | None = None) -> None:
        self.name = name
        self._memory = MemoryPages()
        self._inner = inner or self._memory
        self.faults: dict[str | tuple[str, int], Fault] = {}
        self.calls: list[tuple[str, list[Any]]] = []
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def pages(self) -> dict[LayerKey, torch.Tensor]:
        return self._memory.pages

    @pages.setter
    def pages(self, pages: dict[LayerKey, torch.Tensor]) -> None:
        self._memory.pages = pages

    def contains(self, keys: Sequence[ChunkKey], deadline_s: float) -> Any:
        return self._call("contains", keys, lambda: self._inner.contains(keys, deadline_s), True)

    def get(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor], deadline_s: float) -> Any:
        return self._call("get", keys, lambda: self._inner.get(keys, pages, deadline_s), Status.OK, pages)

    def put(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor], deadline_s: float) -> Any:
        return self._call("put", keys, lambda: self._inner.put(keys, pages, deadline_s), Status.OK)

    def close(self) -> None:
        self._call("close", [], self._close, None)

    def calls_of(self, name: str) -> list[list[Any]]:
        with self._lock:
            return [keys for called, keys in self.calls if called == name]

    def end_faults(self) -> None:
        """Let everything that hangs go on, and go wrong no more."""
        with self._lock:
            faults, self.faults = self.faults, {}
        for fault in faults.values():
            if fault.gate is not None:
                fault.gate.set()

    def _close(self) -> list[None]:
        if self._inner is not self._memory:
            self._inner.close()
        return []

    def _call(
        self,
        name: str,
        keys: Sequence[Any],
        work: Callable[[], list[Any]],
        well: Any,
        pages: Sequence[torch.Tensor] = (),
    ) -> Any:
        with self._lock:
            fault = self.faults.get((name, self._counts[name])) or self.faults.get(name) or Fault()
            self._counts[name] += 1
            self.calls.append((name, list(keys)))
        fault.entered.set()
        if fault.gate is not None:
            fault.gate.wait(LONG_S)
        fault.before(pages)
        if fault.error is not None:
            raise fault.error
        return fault.answer([well] * len(keys) if fault.drop else work())
