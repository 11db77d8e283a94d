from __future__ import annotations

import numpy as np
import pytest
import torch

from lwkv.codecs.lossless import LosslessPages
from lwkv.codecs.page_check import PageCheck
from lwkv.codecs.raw import RawPages
from lwkv.codecs.torch_lossless import TorchLossless
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.platforms import Platform
from lwkv.pool.host_pool import HostPool

CHUNK = 64


def layer(heads: int) -> PagedLayer:
    rows = torch.zeros(4, 16, heads, 32, dtype=torch.bfloat16)
    return PagedLayer(str(heads), torch.bfloat16, rows, rows.clone())


@pytest.fixture
def pool(platform: Platform) -> HostPool:
    return HostPool(platform, 1 << 14, 12 << 14, slab_bytes=5 << 14)


@pytest.mark.parametrize("heads", [(2, 2, 2), (2, 1, 2)], ids=["alike", "of two forms"])
def test_layers_are_looked_at_together_and_each_page_has_its_own_answer(
    heads: tuple[int, ...], pool: HostPool
) -> None:
    layers = [layer(each) for each in heads]
    codec = LosslessPages(CHUNK, TorchLossless)
    taken = pool.allocate(12)
    assert taken is not None
    pages = taken[::-1].reshape(3, 4)  # of several slabs
    steep = {(0, 3), (1, 0), (2, 2)}
    for (number, chunk), page in np.ndenumerate(pages):
        coder = codec.coder(layers[number])
        raw = torch.randn(coder.raw_bytes // 2).bfloat16()
        if (number, chunk) in steep:
            raw.view(-1, 32)[:, 1:] = 1e-30
        coder.encode(raw.view(torch.uint8), pool.page(int(page)), 1)
    check = PageCheck(codec, layers, pool)
    wanted = np.array([[(number, chunk) not in steep for chunk in range(4)] for number in range(3)])
    assert (check.fits(range(3), pages) == wanted).all()
    assert (check.fits(range(1, 3), pages[1:]) == wanted[1:]).all()
    assert check.fits(range(2, 2), pages[2:2]).shape == (0, 4)
    for number in range(3):
        assert (check.whole(number, pages[number]) == wanted[number]).all()


def test_raw_pages_are_always_good(pool: HostPool) -> None:
    check = PageCheck(RawPages(CHUNK), [layer(2)] * 2, pool)
    assert check.fits(range(2), np.arange(8).reshape(2, 4)).all()
