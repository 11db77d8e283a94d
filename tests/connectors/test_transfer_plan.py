"""Plans of transfers: the ways that cost less move the very same rows and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lwkv.codecs.raw import RawPages
from lwkv.connectors.transfer_plan import Plans, Slice, TransferPlan, page_shape
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.platforms import CopyBatch, Int64s
from lwkv.platforms.cpu import CPU
from lwkv.pool.host_pool import HostPool
from lwkv.transfer import NO_SLOT, Transfer

CHUNK, LAYERS, PAGES = 4, 3, 32
HEAD_SIZE = 128
"""A page is 4096 bytes then, and neighbouring pages are neighbouring memory."""


def layer(head_size: int = HEAD_SIZE) -> PagedLayer:
    k, v = torch.zeros(2, 16, 4, 1, head_size, dtype=torch.int32)
    return PagedLayer("a", torch.float32, k, v)


class PlanSetup:
    """A pool with memory for PAGES pages in slabs of 8, and layers that are all alike."""

    def __init__(self) -> None:
        self.platform = CPU()
        self.device = self.platform.current_device()
        self.layers = [layer() for _ in range(LAYERS)]
        page_bytes = self.layers[0].page_bytes(CHUNK)
        self.pool = HostPool(self.platform, page_bytes, PAGES * page_bytes, 8 * page_bytes)
        self.pool.reserve(PAGES * page_bytes)

    def plans(self, chunks_per_slice: int, layers: Sequence[PagedLayer]) -> Plans:
        return Plans(self.platform, layers, self.pool, RawPages(CHUNK), CHUNK, chunks_per_slice)

    def plan(self, chunks_per_slice: int, transfer: Transfer, pages: Int64s | None = None) -> TransferPlan:
        plans = self.plans(chunks_per_slice, self.layers)
        return plans.make(transfer, self.platform.current_stream(self.device), pages)

    def listed(self, slices: list[Slice]) -> list[tuple[int, int, list[list[int]]]]:
        """First and last row of each slice, and its slots, K rows and V rows."""
        self.platform.synchronize_device(self.device)
        return [(piece.first_row, piece.last_row, [rows.tolist() for rows in piece.rows]) for piece in slices]


@pytest.fixture(scope="module")
def setup() -> Iterator[PlanSetup]:
    made = PlanSetup()
    yield made
    made.platform.close()


def full_chunks(num_chunks: int) -> Transfer:
    return Transfer(np.full(num_chunks, CHUNK), np.arange(num_chunks * CHUNK)[::-1].copy())


def arrays(batch: CopyBatch) -> list[list[int]]:
    return [
        part.tolist()
        for part in (
            batch.slab_of,
            batch.host_offsets,
            batch.host_addresses,
            batch.device_offsets,
            batch.sizes,
        )
    ]


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 7])
@pytest.mark.parametrize("chunks_per_slice", [1, 2, 3, 8])
def test_full_chunks_are_cut_as_any_chunks_are(
    setup: PlanSetup, num_chunks: int, chunks_per_slice: int
) -> None:
    plan = setup.plan(chunks_per_slice, full_chunks(num_chunks))
    assert plan.num_slices == -(-num_chunks // chunks_per_slice)
    any_chunks = plan._make_slices(page_shape(setup.layers[0], CHUNK))
    assert setup.listed(plan.slices(setup.layers[0])) == setup.listed(any_chunks)


@given(
    st.lists(st.integers(1, CHUNK), min_size=1, max_size=7).flatmap(
        lambda counts: st.tuples(
            st.just(counts), st.lists(st.booleans(), min_size=sum(counts), max_size=sum(counts))
        )
    ),
    st.integers(1, 4),
)
def test_slices_have_every_moved_slot_once_and_in_order(
    setup: PlanSetup, drawn: tuple[list[int], list[bool]], chunks_per_slice: int
) -> None:
    counts, moved = drawn
    slots = np.where(moved, np.arange(len(moved)), NO_SLOT)
    slices = setup.plan(chunks_per_slice, Transfer(np.array(counts), slots)).slices(setup.layers[0])
    assert len(slices) == -(-len(counts) // chunks_per_slice)
    found = [slot for _, _, (slots_, _, _) in setup.listed(slices) for slot in slots_]
    assert found == slots[slots != NO_SLOT].tolist()
    ends = [0, *(piece.last_row for piece in slices)]
    assert [piece.first_row for piece in slices] == ends[:-1]


@given(st.data(), st.integers(1, 6), st.integers(1, 4))
def test_copies_made_together_are_those_of_each_layer_alone(
    setup: PlanSetup, data: st.DataObject, num_chunks: int, chunks_per_slice: int
) -> None:
    """Whether all pages are known at the start, or those of a layer when it is copied."""
    first = data.draw(st.integers(0, PAGES - LAYERS * num_chunks))
    in_order = list(range(first, first + LAYERS * num_chunks))
    numbers = data.draw(st.just(in_order) | st.permutations(in_order))
    pages = np.array(numbers, np.int64).reshape(LAYERS, num_chunks)
    together, alone = (
        setup.plan(chunks_per_slice, full_chunks(num_chunks), known) for known in (pages, None)
    )
    for index, paged in enumerate(setup.layers):
        for number in range(together.num_slices):
            one = range(index, index + 1)
            batches = [plan.copy(one, number, paged, pages[index]) for plan in (together, alone)]
            assert arrays(batches[0]) == arrays(batches[1])


@pytest.mark.parametrize("num_chunks", range(1, 7))
def test_layers_that_share_a_staging_buffer_fit_into_it(setup: PlanSetup, num_chunks: int) -> None:
    pages = np.arange(LAYERS * num_chunks).reshape(LAYERS, num_chunks)
    shared = setup.plan(4, full_chunks(num_chunks), pages)
    assert shared.layers_per_buffer == max(1, 4 // num_chunks)
    assert setup.plan(4, full_chunks(num_chunks)).layers_per_buffer == 1, "pages are not known yet"


def test_layers_that_are_not_alike_share_no_buffer(setup: PlanSetup) -> None:
    mixed = setup.plans(4, [setup.layers[0], layer(2 * HEAD_SIZE)])
    assert not mixed.slice_shape.may_share
    assert mixed.slice_shape.layers_per_buffer(1) == 1
