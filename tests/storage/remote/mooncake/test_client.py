"""Which memory Mooncake's client has registered, with a store that only notes it."""

from __future__ import annotations

import gc

import torch

from lwkv.storage.remote.mooncake.client import MooncakeStore
from lwkv.storage.remote.seal import MOST_SEAL_BYTES

SLAB, PAGE = 16384, 4096


class NotingStore:
    """Notes what is registered; puts and gets succeed."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def register_buffer(self, address: int, size: int) -> int:
        ends = [(start, start + length) for start, length in self.registered.items()]
        if any(start < address + size and address < end for start, end in ends):
            return -1
        self.registered[address] = size
        return 0

    def unregister_buffer(self, address: int) -> int:
        del self.registered[address]
        return 0

    def batch_put_from_multi_buffers(self, names: list[str], *_: object) -> list[int]:
        return [0] * len(names)


def put(store: MooncakeStore, slab: torch.Tensor) -> None:
    pages = [slab[:PAGE], slab[PAGE : 2 * PAGE]]
    assert store.put(["a", "b"], ["g", "g"], pages, [bytes(MOST_SEAL_BYTES)] * 2) == [0, 0]


def test_memory_that_nobody_has_any_more_is_neither_registered_nor_kept() -> None:
    """The owner of a node's memory may be followed by others: what was the first one's is to go."""
    inner = NotingStore()
    store = MooncakeStore(inner, lambda _: None)
    first, second = (torch.zeros(SLAB, dtype=torch.uint8) for _ in range(2))
    put(store, first)
    put(store, second)
    put(store, first)
    assert len(inner.registered) == 3, "and the seals"
    address = first.data_ptr()
    del first
    gc.collect()
    third = torch.zeros(2 * SLAB, dtype=torch.uint8)
    put(store, third)
    assert inner.registered.get(address) in (None, 2 * SLAB)
    assert len(inner.registered) == 3
    assert {second.data_ptr(), third.data_ptr()} <= set(inner.registered)
    put(store, second)
    assert len(inner.registered) == 3
