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

UNSPECIALIZED = ("num_rows", "cache_rows", "staging_rows")
UNALIGNED = ("slots", "k_rows", "v_rows")


@triton.jit
def _load_numbers(numbers, entry, num_rows, limit):
    """Row numbers of these entries, and which of them are in range."""
    number = tl.load(numbers + entry, mask=entry < num_rows, other=-1)
    return number, (number >= 0) & (number < limit)


@triton.jit
def _locate(slot, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr):
    return (slot // BLOCK_SIZE) * BLOCK_STRIDE + (slot % BLOCK_SIZE) * TOKEN_STRIDE


@triton.jit
def _copy(
    source, target, source_row, target_row, valid, column,
    SOURCE_HEAD: tl.constexpr, TARGET_HEAD: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy columns of rows that start at `source_row` and `target_row`; *_HEAD are the strides of heads."""
    head, inside = (column // WIDTH).to(tl.int64), column % WIDTH
    mask = valid[:, None] & (column < HEADS * WIDTH)[None, :]
    words = tl.load(source + source_row[:, None] + (head * SOURCE_HEAD + inside)[None, :], mask=mask)
    tl.store(target + target_row[:, None] + (head * TARGET_HEAD + inside)[None, :], words, mask=mask)


@triton.jit
def _turn(
    source, target, source_row, target_row, cos, sin, entry, valid, pair,
    SOURCE_HEAD: tl.constexpr, TARGET_HEAD: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate pairs of elements on their way from source to target."""
    head, i = (pair // HALF).to(tl.int64), pair % HALF
    first = 2 * i if INTERLEAVED else i
    step: tl.constexpr = 1 if INTERLEAVED else HALF
    mask = valid[:, None] & (pair < HEADS * HALF)[None, :]
    angle = entry.to(tl.int64)[:, None] * HALF + i[None, :]
    c = tl.load(cos + angle, mask=mask)
    s = tl.load(sin + angle, mask=mask)
    origin = source + source_row[:, None] + (head * SOURCE_HEAD + first)[None, :]
    place = target + target_row[:, None] + (head * TARGET_HEAD + first)[None, :]
    a = tl.load(origin, mask=mask)
    b = tl.load(origin + step, mask=mask)
    if source.dtype.element_ty != tl.float64:
        a, b = a.to(tl.float32), b.to(tl.float32)
    tl.store(place, (a * c - b * s).to(target.dtype.element_ty), mask=mask)
    tl.store(place + step, (b * c + a * s).to(target.dtype.element_ty), mask=mask)


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
    slot, there = _load_numbers(slots, entry, num_rows, cache_rows)
    place = _locate(slot, BLOCK_SIZE, BLOCK_STRIDE, TOKEN_STRIDE)
    k_row, k_valid = _load_numbers(k_rows, entry, num_rows, staging_rows)
    k_row *= HEADS * WIDTH
    if SCATTER:
        _copy(staged, k, k_row, place, there & k_valid, column, WIDTH, HEAD_STRIDE, HEADS, WIDTH)
    else:
        _copy(k, staged, place, k_row, there & k_valid, column, HEAD_STRIDE, WIDTH, HEADS, WIDTH)
    if PARTS == 2:
        v_row, v_valid = _load_numbers(v_rows, entry, num_rows, staging_rows)
        v_row *= HEADS * WIDTH
        if SCATTER:
            _copy(staged, v, v_row, place, there & v_valid, column, WIDTH, HEAD_STRIDE, HEADS, WIDTH)
        else:
            _copy(v, staged, place, v_row, there & v_valid, column, HEAD_STRIDE, WIDTH, HEADS, WIDTH)


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def scatter_rotated(
    k, v, staging, slots, k_rows, v_rows, cos, sin, num_rows, cache_rows, staging_rows,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, WORD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Copy rows into the cache and rotate K. Sizes count in elements; V's words hold WORD of them."""
    entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    slot, there = _load_numbers(slots, entry, num_rows, cache_rows)
    k_row, k_valid = _load_numbers(k_rows, entry, num_rows, staging_rows)
    k_row *= HEADS * WIDTH
    k_valid &= there
    place = _locate(slot, BLOCK_SIZE, BLOCK_STRIDE, TOKEN_STRIDE)
    staged_k = staging.to(k.dtype, bitcast=True)
    _turn(
        staged_k,
        k,
        k_row,
        place,
        cos,
        sin,
        entry,
        k_valid,
        column,
        WIDTH,
        HEAD_STRIDE,
        HEADS,
        HALF,
        INTERLEAVED,
    )
    REST: tl.constexpr = WIDTH - 2 * HALF
    if REST > 0:
        from_row, to_row = k_row + 2 * HALF, place + 2 * HALF
        _copy(staged_k, k, from_row, to_row, k_valid, column, WIDTH, HEAD_STRIDE, HEADS, REST)
    if PARTS == 2:
        v_row, v_valid = _load_numbers(v_rows, entry, num_rows, staging_rows)
        v_row *= HEADS * WIDTH // WORD
        place = _locate(slot, BLOCK_SIZE, BLOCK_STRIDE // WORD, TOKEN_STRIDE // WORD)
        staged_v = staging.to(v.dtype, bitcast=True)
        _copy(
            staged_v, v, v_row, place, there & v_valid, column,
            WIDTH // WORD, HEAD_STRIDE // WORD, HEADS, WIDTH // WORD,
        )  # fmt: skip
