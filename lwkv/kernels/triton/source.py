# mypy: ignore-errors
"""What runs on the device, in Triton's language.

A program handles ROWS rows and COLUMNS columns of each. Rows out of range are masked. Offsets are int64:
caches are larger than 2**31 elements. Sizes and strides are constants, so that the compiler can tell how
wide its loads may be; the number of rows is none, and nothing depends on the alignment of the index tensors,
so that a layer compiles once.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNSPECIALIZED = ("num_rows", "cache_rows", "staging_rows", "layer_words")
UNALIGNED = ("slots", "k_rows", "v_rows")


@triton.jit
def load_numbers(numbers, entry, num_rows, limit):
    """Row numbers of these entries, and which of them are in range."""
    number = tl.load(numbers + entry, mask=entry < num_rows, other=-1)
    return number, (number >= 0) & (number < limit)


@triton.jit
def locate(slot, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr):
    return (slot // BLOCK_SIZE) * BLOCK_STRIDE + (slot % BLOCK_SIZE) * TOKEN_STRIDE


@triton.jit
def copy(
    source, target, source_row, target_row, valid, column,
    SOURCE_HEAD: tl.constexpr, TARGET_HEAD: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy columns of rows that start at `source_row` and `target_row`; *_HEAD are the strides of heads."""
    head, inside = (column // WIDTH).to(tl.int64), column % WIDTH
    mask = valid[:, None] & (column < HEADS * WIDTH)[None, :]
    words = tl.load(source + source_row[:, None] + (head * SOURCE_HEAD + inside)[None, :], mask=mask)
    tl.store(target + target_row[:, None] + (head * TARGET_HEAD + inside)[None, :], words, mask=mask)


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def move(
    k, v, staging, slots, k_rows, v_rows, num_rows, cache_rows, staging_rows,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    SCATTER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Copy rows of K and V between cache and staging; strides count in words of the cache's type."""
    entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    staged = staging.to(k.dtype, bitcast=True)
    slot, there = load_numbers(slots, entry, num_rows, cache_rows)
    place = locate(slot, BLOCK_SIZE, BLOCK_STRIDE, TOKEN_STRIDE)
    for part in tl.static_range(PARTS):
        cache = k if part == 0 else v
        row, valid = load_numbers(k_rows if part == 0 else v_rows, entry, num_rows, staging_rows)
        row *= HEADS * WIDTH
        valid &= there
        if SCATTER:
            copy(staged, cache, row, place, valid, column, WIDTH, HEAD_STRIDE, HEADS, WIDTH)
        else:
            copy(cache, staged, place, row, valid, column, HEAD_STRIDE, WIDTH, HEADS, WIDTH)


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=(*UNALIGNED, "places"))
def move_layers(
    places, staging, slots, k_rows, v_rows, num_rows, cache_rows, staging_rows, layer_words,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    SCATTER: tl.constexpr, WORD: tl.constexpr, ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Move the same rows of several layers.

    `places` has the addresses of K and V of each; in staging they lie `layer_words` words apart.
    """
    layer = tl.program_id(2).to(tl.int64)
    k = tl.load(places + 2 * layer).to(tl.pointer_type(WORD))
    v = tl.load(places + 2 * layer + 1).to(tl.pointer_type(WORD))
    staged = staging.to(tl.pointer_type(WORD), bitcast=True) + layer * layer_words
    move(
        tl.multiple_of(k, ALIGNMENT), tl.multiple_of(v, ALIGNMENT), tl.multiple_of(staged, 16),
        slots, k_rows, v_rows, num_rows, cache_rows, staging_rows,
        BLOCK_SIZE, HEADS, WIDTH, BLOCK_STRIDE, TOKEN_STRIDE, HEAD_STRIDE, SCATTER, ROWS, COLUMNS, PARTS,
    )  # fmt: skip
