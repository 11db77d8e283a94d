"""Pages coded from the cache and decoded into it: as by way of raw pages, and nothing else is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from oracle import FORMS, Dims, Oracle
from page_coders import IN_TORCH, coder_of, decoded, encoded
from torch import Tensor

from lwkv.codecs import Coder, PagedCoder
from lwkv.codecs.fp8_form import Fp8Form
from lwkv.codecs.lossless_form import LosslessForm
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.platforms import Platform

CHUNK, PAGES = 16, 2
DIMS = Dims(layers=3, blocks=24, head_size=4, dtype=torch.bfloat16)
CODECS = [("lossless", torch.bfloat16), ("fp8", torch.bfloat16), ("fp8", torch.float32)]
CODED = [form for form in FORMS if form != "opaque"]


@dataclass
class Caches:
    """Layers of an engine with random bits in them, rows of two elements at least, and what codes them."""

    layers: list[PagedLayer]
    plain: Coder
    coder: PagedCoder
    device: torch.device

    def slots(self, seed: int) -> Tensor:
        chosen = np.random.default_rng(seed).permutation(self.layers[0].num_rows)[: PAGES * CHUNK]
        return torch.from_numpy(chosen.astype(np.int64)).to(self.device)

    def rows(self, layer: PagedLayer, slots: Tensor) -> Tensor:
        """Raw pages of these slots, uint8 [pages, bytes], on the host."""
        views = [view for view in (layer.k, layer.v) if view is not None]
        block, offset = slots // views[0].shape[1], slots % views[0].shape[1]
        parts = [view[block, offset].view(PAGES, CHUNK, -1) for view in views]
        return torch.stack(parts, 1).cpu().contiguous().view(torch.uint8).view(PAGES, -1)


@pytest.fixture(params=CODED)
def layout(request: pytest.FixtureRequest) -> str:
    layout: str = request.param
    return layout


@pytest.fixture(params=CODECS, ids=lambda codec: f"{codec[0]} {codec[1].itemsize}")
def caches(
    request: pytest.FixtureRequest, layout: str, platform: Platform, device: torch.device
) -> Iterator[Caches]:
    codec, dtype = request.param
    make = coder_of("triton", platform, codec)
    oracle = Oracle(platform, device, layout, replace(DIMS, dtype=dtype))
    with oracle.engine(CHUNK, page_codec=codec) as engine:
        layers: list[Any] = list(engine.connector.layers)
        first = layers[0]
        rows = first.parts * CHUNK * first.heads
        lossless = codec == "lossless"
        form = LosslessForm(rows, first.width) if lossless else Fp8Form(rows, first.width, dtype)
        for number, layer in enumerate(layers):
            for view in (layer.k, layer.v):
                if view is not None:
                    bits = np.random.default_rng(number).integers(0x3F00, 0x4100, view.shape)
                    bits[..., 0] = np.random.default_rng(9).integers(0, 0x7FFF, bits.shape[:-1])
                    bits = bits << 16 if dtype == torch.float32 else bits
                    view.copy_(torch.from_numpy(bits.astype(np.int64)))
        coder = make(form).paged(layers)
        if coder is None:
            pytest.skip("layers of this layout are coded by way of raw pages")
        yield Caches(layers, IN_TORCH[codec](form), coder, device)


@pytest.mark.parametrize(("first", "last"), [(0, 1), (1, 3)])
def test_pages_are_coded_and_decoded_as_by_way_of_raw_ones(
    first: int, last: int, caches: Caches, run: Callable
) -> None:
    layers, source, target = caches.layers[first:last], caches.slots(1), caches.slots(2)
    coded = torch.full(((last - first) * PAGES * caches.plain.page_bytes,), 0xA5, dtype=torch.uint8)
    coded = coded.to(caches.device)
    run(lambda: caches.coder.encode(layers, source, coded, PAGES))
    by_layer = coded.cpu().view(last - first, PAGES, -1)
    before = [caches.rows(layer, source) for layer in caches.layers]
    for pages, raw in zip(by_layer, before[first:last], strict=True):
        assert torch.equal(pages, encoded(caches.plain, raw))
    others = [_all_others(layer, target) for layer in caches.layers]
    run(lambda: caches.coder.decode(layers, target, coded, PAGES))
    for number, layer in enumerate(caches.layers):
        if first <= number < last:
            wanted = decoded(caches.plain, encoded(caches.plain, before[number]))
            assert torch.equal(caches.rows(layer, target), wanted)
        assert torch.equal(_all_others(layer, target), others[number])


def test_slots_that_do_not_exist_are_neither_read_nor_written(caches: Caches, run: Callable) -> None:
    layers, slots = caches.layers[:1], caches.slots(1)
    slots[3], slots[20] = -1, caches.layers[0].num_rows
    coded = torch.zeros(PAGES * caches.plain.page_bytes, dtype=torch.uint8, device=caches.device)
    run(lambda: caches.coder.encode(layers, slots, coded, PAGES))
    there = torch.ones(PAGES * CHUNK, dtype=torch.bool)
    there[3] = there[20] = False
    raw = caches.rows(layers[0], torch.where(there.to(caches.device), slots, 0))
    shaped = raw.view(PAGES, layers[0].parts, CHUNK, -1)
    shaped[~there.view(PAGES, 1, CHUNK).expand(-1, layers[0].parts, -1)] = 0
    assert torch.equal(coded.cpu().view(PAGES, -1), encoded(caches.plain, raw))
    before = _all_others(layers[0], slots[there.to(caches.device)])
    run(lambda: caches.coder.decode(layers, slots, coded, PAGES))
    assert torch.equal(_all_others(layers[0], slots[there.to(caches.device)]), before)


@pytest.mark.parametrize("seed", [7])
def test_whatever_is_decoded_only_its_slots_are_written(seed: int, caches: Caches, run: Callable) -> None:
    layers, slots = caches.layers[1:2], caches.slots(seed)
    broken = np.random.default_rng(seed).integers(0, 256, PAGES * caches.plain.page_bytes, np.uint8)
    coded = torch.from_numpy(broken).to(caches.device)
    before = [_all_others(layer, slots) for layer in caches.layers]
    run(lambda: caches.coder.decode(layers, slots, coded, PAGES))
    for layer, others in zip(caches.layers, before, strict=True):
        assert torch.equal(_all_others(layer, slots), others)


def _all_others(layer: PagedLayer, slots: Tensor) -> Tensor:
    """What is in all slots but these, on the host."""
    views = [view for view in (layer.k, layer.v) if view is not None]
    others = torch.ones(layer.num_rows, dtype=torch.bool)
    others[slots.cpu()] = False
    rows = torch.cat([view.cpu().reshape(layer.num_rows, -1) for view in views], 1)
    return rows[others]
