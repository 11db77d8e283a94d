from __future__ import annotations

import torch

from lwkv.benchmarks.throttled.tier import ThrottledTier
from lwkv.keys import ChunkKey, LayerKey
from lwkv.storage import Status

CHUNK = ChunkKey("test", b"0123456789abcdef")


def test_pages_come_back_and_others_are_a_miss() -> None:
    tier = ThrottledTier()
    page = torch.arange(5, dtype=torch.uint8)
    assert tier.put([LayerKey(CHUNK, 0)], [page], 1.0) == [Status.OK]
    page.zero_()
    pages = [torch.full((5,), 9, dtype=torch.uint8) for _ in range(2)]
    assert tier.get([LayerKey(CHUNK, 0), LayerKey(CHUNK, 1)], pages, 1.0) == [Status.OK, Status.MISS]
    assert [page.tolist() for page in pages] == [[0, 1, 2, 3, 4], [9] * 5]


def test_reading_takes_as_long_as_the_bytes_are_many() -> None:
    tier = ThrottledTier()
    tier.seconds_per_byte = 1e-3
    tier.get([LayerKey(CHUNK, 0)], [torch.zeros(7, dtype=torch.uint8)], 1.0)
    assert len(tier.reads) == 1
    assert tier.reads[0] >= 7e-3


def test_a_chunk_is_there_when_its_first_layer_is() -> None:
    tier = ThrottledTier()
    tier.put([LayerKey(CHUNK, 1)], [torch.zeros(1, dtype=torch.uint8)], 1.0)
    assert tier.contains([CHUNK], 1.0) == [False]
    tier.put([LayerKey(CHUNK, 0)], [torch.zeros(1, dtype=torch.uint8)], 1.0)
    assert tier.contains([CHUNK], 1.0) == [True]
    tier.close()
    assert tier.contains([CHUNK], 1.0) == [False]
