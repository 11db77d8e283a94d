# mypy: ignore-errors
"""What runs on the device, in Triton's language, where keys are turned on their way into the cache.

See `lwkv.kernels.triton.source`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lwkv.kernels.triton.source import UNALIGNED, UNSPECIALIZED, copy, load_numbers, locate


@triton.jit
def _turn(
    source, target, source_row, target_row, cos, sin, row_angle, valid, pair,
    SOURCE_HEAD: tl.constexpr, TARGET_HEAD: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate pairs of elements on their way from source to target."""
    head, i = (pair // HALF).to(tl.int64), pair % HALF
    first = 2 * i if INTERLEAVED else i
    step: tl.constexpr = 1 if INTERLEAVED else HALF
    mask = valid[:, None] & (pair < HEADS * HALF)[None, :]
    angle = row_angle[:, None] * HALF + i[None, :]
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


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=(*UNALIGNED, "angle_of"))
def scatter_turned(
    k, v, staging, slots, k_rows, v_rows, cos, sin, angle_of, num_rows, cache_rows, staging_rows,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, WORD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Copy rows into the cache and turn K. Sizes count in elements; V's words hold WORD of them."""
    entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    slot, there = load_numbers(slots, entry, num_rows, cache_rows)
    k_row, k_valid = load_numbers(k_rows, entry, num_rows, staging_rows)
    k_row *= HEADS * WIDTH
    k_valid &= there
    place = locate(slot, BLOCK_SIZE, BLOCK_STRIDE, TOKEN_STRIDE)
    staged_k = staging.to(k.dtype, bitcast=True)
    _turn(
        staged_k,
        k,
        k_row,
        place,
        cos,
        sin,
        tl.load(angle_of + entry, mask=entry < num_rows, other=0),
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
        copy(staged_k, k, from_row, to_row, k_valid, column, WIDTH, HEAD_STRIDE, HEADS, REST)
    if PARTS == 2:
        v_row, v_valid = load_numbers(v_rows, entry, num_rows, staging_rows)
        v_row *= HEADS * WIDTH // WORD
        place = locate(slot, BLOCK_SIZE, BLOCK_STRIDE // WORD, TOKEN_STRIDE // WORD)
        staged_v = staging.to(v.dtype, bitcast=True)
        copy(
            staged_v, v, v_row, place, there & v_valid, column,
            WIDTH // WORD, HEAD_STRIDE // WORD, HEADS, WIDTH // WORD,
        )  # fmt: skip
