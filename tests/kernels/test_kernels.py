"""Rows move between any strided cache and packed pages, bit for bit, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lwkv.kernels import Kernels, Rows, StagedLayers, TorchKernels, choose_kernels
from lwkv.layouts.layout import PagedLayer
from lwkv.platforms import Platform

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = [
    *(torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bfloat16, torch.float16),
    *(torch.float32, torch.float64),
]
PADDING = 0xA5


@dataclass(frozen=True)
class Paged:
    """A cache (blocks, parts, tokens, heads, width) of integers in padded memory."""

    memory: Tensor
    strides: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @property
    def cache(self) -> Tensor:
        integers = self.memory.view(INTEGERS[self.dtype.itemsize])
        return integers.as_strided(self.shape, self.strides, self.offset)

    @property
    def layer(self) -> PagedLayer:
        k, *v = self.cache.unbind(1)
        return PagedLayer("deep.0", self.dtype, k, v[0] if v else None)

    def copy_to(self, device: torch.device) -> Paged:
        return replace(self, memory=self.memory.to(device, copy=True))

    def rows(self) -> Tensor:
        """The same memory as (slots, parts, heads, width), copied."""
        return self.cache.transpose(1, 2).flatten(0, 1)


def make_paged(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    order: tuple[int, ...] = (0, 1, 2, 3),
    gap: int = 0,
    offset: int = 0,
) -> Paged:
    """Every element's bits tell its layer, part, block, token, head and element apart as far as they can."""
    strides, step = [1] * 5, shape[4] + gap
    for dim in reversed(order):
        strides[dim] = step
        step = step * shape[dim] + gap
    need = offset + 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    memory = torch.full((need * dtype.itemsize,), PADDING, dtype=torch.uint8)
    paged = Paged(memory, tuple(strides), shape, offset, dtype)
    index = torch.arange(paged.cache.numel()).view(shape)
    paged.cache.copy_((index * 0x9E3779B97F4A7C1 >> 13).to(paged.cache.dtype))
    return paged


def make_rows(slots: list[int], chunk: int, parts: int) -> Rows:
    """Pages of `chunk` tokens one behind the other, the last one shorter: K rows, then V rows, of each."""
    k_rows, v_rows = [], []
    for start in range(0, len(slots), chunk):
        count = min(chunk, len(slots) - start)
        k_rows += range(start * parts, start * parts + count)
        v_rows += range(start * parts + count, start * parts + 2 * count)
    return Rows(*(torch.tensor(numbers, dtype=torch.int64) for numbers in (slots, k_rows, v_rows)))


def expected_staging(paged: Paged, slots: list[int], chunk: int) -> Tensor:
    rows = paged.rows()
    pages = [rows[slots[start : start + chunk]].transpose(0, 1) for start in range(0, len(slots), chunk)]
    return torch.cat([page.contiguous().view(torch.uint8).flatten() for page in pages])


def on(rows: Rows, device: torch.device) -> Rows:
    return Rows(rows.slots.to(device), rows.k_rows.to(device), rows.v_rows.to(device))


@st.composite
def caches(draw: st.DrawFn) -> Paged:
    shape = (
        draw(st.integers(2, 5)),
        draw(st.integers(1, 2)),
        draw(st.sampled_from([1, 4, 5])),
        draw(st.sampled_from([1, 3])),
        draw(st.sampled_from([1, 6, 8])),
    )
    order = tuple(draw(st.permutations(range(4))))
    gap, offset = draw(st.sampled_from([(0, 0), (3, 0), (8, 1), (0, 5)]))
    return make_paged(shape, draw(st.sampled_from(DTYPES)), order, gap, offset)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(paged=caches(), data=st.data())
def test_any_cache_moves_to_pages_and_into_other_slots_exactly(
    paged: Paged, data: st.DataObject, kernels: Kernels, run: Callable, device: torch.device
) -> None:
    blocks, parts, tokens, *_ = paged.shape
    sources = data.draw(st.lists(st.integers(0, blocks * tokens - 1), min_size=1, unique=True))
    sources[0] = blocks * tokens - 1 if blocks * tokens - 1 not in sources else sources[0]
    targets = data.draw(st.permutations(range(blocks * tokens)))[: len(sources)]
    chunk = data.draw(st.integers(1, len(sources)))
    packed = expected_staging(paged, sources, chunk)
    on_device = paged.copy_to(device)
    staging = torch.full((packed.numel() + 16,), PADDING, dtype=torch.uint8, device=device)
    rows = on(make_rows(sources, chunk, parts), device)
    run(lambda: kernels.gather(on_device.layer, staging, rows))
    assert torch.equal(staging.cpu()[:-16], packed)
    assert staging[-16:].eq(PADDING).all()
    assert torch.equal(on_device.memory.cpu(), paged.memory)

    wanted = replace(paged, memory=paged.memory.clone())
    for target, row in zip(targets, paged.rows()[sources], strict=True):
        wanted.cache[target // tokens, :, target % tokens] = row
    run(
        lambda: kernels.scatter(
            on_device.layer, staging, rows._replace(slots=torch.tensor(targets).to(device))
        )
    )
    assert torch.equal(on_device.memory.cpu(), wanted.memory)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_pattern_survives(
    dtype: torch.dtype, kernels: Kernels, run: Callable, device: torch.device
) -> None:
    paged = make_paged((16, 2, 16, 1, 16), dtype)
    infinities = [0x7F, 0xFF, 0x7C01, 0x7F81, 0x7F800001, 0x7FF0000000000001]
    payloads = torch.tensor([n for n in infinities if n < 256**dtype.itemsize // 2 or dtype.itemsize == 1])
    paged.cache.view(-1)[: len(payloads)] = payloads.to(paged.cache.dtype)
    on_device = paged.copy_to(device)
    slots = list(range(256))
    rows = on(make_rows(slots, 100, 2), device)
    staging = torch.zeros(512 * on_device.layer.row_bytes, dtype=torch.uint8, device=device)
    run(lambda: kernels.gather(on_device.layer, staging, rows))
    assert torch.equal(staging.cpu(), expected_staging(paged, slots, 100))
    on_device.cache.zero_()
    run(lambda: kernels.scatter(on_device.layer, staging, rows))
    assert torch.equal(on_device.memory.cpu(), paged.memory)


def test_opaque_blocks_move_whole(kernels: Kernels, run: Callable, device: torch.device) -> None:
    paged = make_paged((5, 1, 1, 1, 2500), torch.bfloat16, gap=4)
    on_device = paged.copy_to(device)
    layer = replace(on_device.layer, page_format="opaque:2500:4:vec", tokens_per_row=4)
    staging = torch.zeros(layer.page_bytes(12), dtype=torch.uint8, device=device)
    rows = on(make_rows([4, 0, 2], 3, 1), device)
    run(lambda: kernels.gather(layer, staging, rows))
    assert torch.equal(staging.cpu(), expected_staging(paged, [4, 0, 2], 3))
    run(lambda: kernels.scatter(layer, staging, rows._replace(slots=rows.slots.flip(0))))
    assert torch.equal(on_device.cache[[2, 0, 4]].cpu(), paged.cache[[4, 0, 2]])


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.uint8, 5), (torch.bfloat16, 6), (torch.float32, 8)], ids=str
)
@pytest.mark.parametrize(("first", "last"), [(0, 1), (1, 3), (0, 4), (2, 4)])
def test_neighbouring_layers_move_together_as_one_by_one(
    parts: int,
    dtype: torch.dtype,
    width: int,
    first: int,
    last: int,
    kernels: Kernels,
    run: Callable,
    device: torch.device,
) -> None:
    made = [make_paged((5, parts, 4, 3, width), dtype, gap=16) for _ in range(4)]
    for number, paged in enumerate(made):
        paged.cache.add_(7 * number)
    paged = [one.copy_to(device) for one in made]
    layers = [one.layer for one in paged]
    kernels.prepare(layers)
    kernels.prepare([one.copy_to(device).layer for one in made[:2]])  # of another group of the engine
    slots, step = [17, 3, 4, 9, 10], 16 * layers[0].row_bytes
    rows = on(make_rows(slots, 2, parts), device)
    staging = torch.full(((last - first) * step,), PADDING, dtype=torch.uint8, device=device)
    run(lambda: kernels.move_layers(False, StagedLayers(layers[first:last], staging, step, rows)))
    for staged, one in zip(staging.cpu().view(-1, step), made[first:last], strict=True):
        packed = expected_staging(one, slots, 2)
        assert torch.equal(staged[: packed.numel()], packed)
        assert staged[packed.numel() :].eq(PADDING).all()
    turned = rows._replace(slots=rows.slots.flip(0))
    run(lambda: kernels.move_layers(True, StagedLayers(layers[first:last], staging, step, turned)))
    for number, (one, before) in enumerate(zip(paged, made, strict=True)):
        wanted = replace(before, memory=before.memory.clone())
        if first <= number < last:
            for target, row in zip(reversed(slots), before.rows()[slots], strict=True):
                wanted.cache[target // 4, :, target % 4] = row
        assert torch.equal(one.memory.cpu(), wanted.memory)


def test_no_rows_move_nothing(kernels: Kernels, run: Callable, device: torch.device) -> None:
    paged = make_paged((3, 2, 4, 2, 8), torch.float16)
    on_device = paged.copy_to(device)
    staging = torch.full((64,), PADDING, dtype=torch.uint8, device=device)
    rows = on(make_rows([], 4, 2), device)
    run(
        lambda: (
            kernels.gather(on_device.layer, staging, rows),
            kernels.scatter(on_device.layer, staging, rows),
        )
    )
    assert torch.equal(on_device.memory.cpu(), paged.memory)
    assert staging.eq(PADDING).all()


def test_staging_may_be_a_part_of_a_larger_buffer(
    kernels: Kernels, run: Callable, device: torch.device
) -> None:
    paged = make_paged((3, 2, 4, 3, 2), torch.bfloat16)
    on_device = paged.copy_to(device)
    slots, skipped = [7, 2, 11], 2 * on_device.layer.row_bytes
    buffer = torch.zeros(skipped + 6 * on_device.layer.row_bytes, dtype=torch.uint8, device=device)
    run(lambda: kernels.gather(on_device.layer, buffer[skipped:], on(make_rows(slots, 2, 2), device)))
    assert torch.equal(buffer[skipped:].cpu(), expected_staging(paged, slots, 2))
    assert not buffer[:skipped].any()


def test_a_cache_made_in_inference_mode_is_written_outside_of_it(
    kernels: Kernels, run: Callable, device: torch.device
) -> None:
    with torch.inference_mode():
        paged = make_paged((3, 2, 4, 2, 8), torch.float16)
        on_device = paged.copy_to(device)
    staging = torch.zeros(4 * on_device.layer.row_bytes, dtype=torch.uint8, device=device)
    rows = on(make_rows([1, 5], 2, 2), device)
    run(lambda: kernels.scatter(on_device.layer, staging, rows))
    assert not on_device.rows()[[1, 5]].any()
    assert torch.equal(on_device.rows()[[0, 2]].cpu(), paged.rows()[[0, 2]])


def test_the_platforms_features_choose_the_kernels(platform: Platform) -> None:
    chosen = choose_kernels(platform)
    assert chosen.name == ("triton" if platform.features.triton else "torch")
    assert TorchKernels().name == "torch"
