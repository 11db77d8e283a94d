"""What a lower tier (disk, remote) must offer. The host tier is special: its pages are the pool's own."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import torch

from lwkv.keys import ChunkKey, LayerKey


class Status(Enum):
    """How one key of a call ended. Only pages with OK may be read."""

    OK = "ok"
    MISS = "miss"
    ERROR = "error"


class Tier(Protocol):
    """A place for pages below host memory.

    Calls block, run on threads of the tier's guard, several at once, and should return within `deadline_s`
    seconds; whoever waits has its own clock. Raising counts as ERROR for every key of the call: raise where
    the tier itself fails, so that it is left alone for a while. A chunk is present when its layer 0 is: the
    guard puts layer 0 last, a tier removes it first.

    At the interpreter's exit the calls under way have five seconds to return, all tiers together: a thread
    that is inside torch when the interpreter goes away can abort the process.
    """

    name: str

    def contains(self, keys: Sequence[ChunkKey], deadline_s: float) -> list[bool]:
        """Whether each chunk is present, without reading payloads."""

    def get(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor], deadline_s: float) -> list[Status]:
        """Fill each page, uint8 (bytes,), with the layer of its key; one status a key."""

    def put(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor], deadline_s: float) -> list[Status]:
        """Keep a copy of each page; the pages do not change before the call returns."""

    def close(self) -> None: ...
