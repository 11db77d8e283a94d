"""A tier in memory whose n-th call can be made to go wrong."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lwkv.keys import ChunkKey, LayerKey
from lwkv.storage import Status

LONG_S = 20.0


@dataclass
class Fault:
    """What happens in one call: it waits for `gate`, then raises `error`, or does its work and returns what
    `answer` makes of it. With `drop` it says that all went well and does nothing."""

    error: BaseException | None = None
    gate: threading.Event | None = None
    answer: Callable[[list[Any]], Any] = lambda answers: answers
    drop: bool = False
    entered: threading.Event = field(default_factory=threading.Event)


def hanging() -> Fault:
    return Fault(gate=threading.Event())


class FaultyTier:
    """`faults[name, n]` is what happens in the n-th call, from 0, of the method of that name; `faults[name]`
    in every other. `calls` has the keys of each call."""

    def __init__(self, name: str = "faulty") -> None:
        self.name = name
        self.pages: dict[LayerKey, torch.Tensor] = {}
        self.faults: dict[str | tuple[str, int], Fault] = {}
        self.calls: list[tuple[str, list[Any]]] = []
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def contains(self, keys: Sequence[ChunkKey], deadline_s: float) -> Any:
        return self._call("contains", keys, lambda i: LayerKey(keys[i], 0) in self.pages, True)

    def get(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor], deadline_s: float) -> Any:
        def fill(i: int) -> Status:
            if keys[i] not in self.pages:
                return Status.MISS
            pages[i].copy_(self.pages[keys[i]])
            return Status.OK

        return self._call("get", keys, fill, Status.OK)

    def put(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor], deadline_s: float) -> Any:
        def keep(i: int) -> Status:
            self.pages[keys[i]] = pages[i].clone()
            return Status.OK

        return self._call("put", keys, keep, Status.OK)

    def close(self) -> None:
        self._call("close", [], lambda i: None, None)

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

    def _call(self, name: str, keys: Sequence[Any], work: Callable[[int], Any], well: Any) -> Any:
        with self._lock:
            fault = self.faults.get((name, self._counts[name])) or self.faults.get(name) or Fault()
            self._counts[name] += 1
            self.calls.append((name, list(keys)))
        fault.entered.set()
        if fault.gate is not None:
            fault.gate.wait(LONG_S)
        if fault.error is not None:
            raise fault.error
        return fault.answer([well if fault.drop else work(i) for i in range(len(keys))])
