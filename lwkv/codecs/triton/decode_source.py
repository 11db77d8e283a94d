# mypy: ignore-errors
"""Decoding on the device, in Triton's language: see `lwkv.codecs.triton.tiles`."""

from __future__ import annotations

import triton
import triton.language as tl

from lwkv.codecs.triton.tiles import (
    RUNTIME,
    UNALIGNED,
    count_escapes,
    locate_in_cache,
    locate_tile,
    rank_escapes,
)


@triton.jit
def _decode_tile(
    coded, halves, words, page, tile, row, place, known,
    GROUPS: tl.constexpr, PAGE: tl.constexpr, TOPS: tl.constexpr, CODES: tl.constexpr, SIGNS: tl.constexpr,
    ESCAPES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """The words of a tile."""
    code = tl.load(coded + page * PAGE + CODES + place, mask=known, other=0).to(tl.int32)
    sign = tl.load(halves + page * (PAGE // 2) + SIGNS // 2 + place, mask=known, other=0).to(tl.int32)
    top = tl.load(coded + page * PAGE + TOPS + row, mask=row < GROUPS * 16, other=0).to(tl.int32)[:, None]
    low, high = code & 15, code >> 4
    low_exponent = tl.where(low == 14, 0, (top - low) & 0xFF)
    high_exponent = tl.where(high == 14, 0, (top - high) & 0xFF)
    first, after = count_escapes(words, page, tile, GROUPS, PAGE, EACH)
    if after > first:
        is_low, is_high = low == 15, high == 15
        low_rank, high_rank = rank_escapes(is_low.to(tl.int32), is_high.to(tl.int32), first)
        escapes = coded + page * PAGE + ESCAPES
        # A page that is not as it should be is not to be read beyond its end.
        has_low = is_low & (low_rank >= 0) & (low_rank < PAGE - ESCAPES)
        has_high = is_high & (high_rank >= 0) & (high_rank < PAGE - ESCAPES)
        low_exponent = tl.where(
            is_low, tl.load(escapes + low_rank, mask=has_low, other=0).to(tl.int32), low_exponent
        )
        high_exponent = tl.where(
            is_high, tl.load(escapes + high_rank, mask=has_high, other=0).to(tl.int32), high_exponent
        )
    first_half = ((sign & 0x80) << 8) | (low_exponent << 7) | (sign & 0x7F)
    second_half = ((sign & 0x8000) << 16) | (high_exponent << 23) | ((sign & 0x7F00) << 8)
    return first_half | second_half


@triton.jit
def decode(
    coded, halves, words, raw,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr, PAGE: tl.constexpr,
    TOPS: tl.constexpr, CODES: tl.constexpr, SIGNS: tl.constexpr, ESCAPES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Write raw pages, words, of coded ones."""
    tile, page = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, place, known = locate_tile(tile, PAIRS, COLUMNS, GROUPS, EACH)
    word = _decode_tile(
        coded, halves, words, page, tile, row, place, known,
        GROUPS, PAGE, TOPS, CODES, SIGNS, ESCAPES, EACH,
    )  # fmt: skip
    tl.store(raw + page * (ROWS * PAIRS) + place, word, mask=known & (row < ROWS)[:, None])


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=UNALIGNED)
def decode_to_cache(
    coded, halves, words, places, slots, pages_a_layer, cache_rows,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr, PAGE: tl.constexpr,
    TOPS: tl.constexpr, CODES: tl.constexpr, SIGNS: tl.constexpr, ESCAPES: tl.constexpr, EACH: tl.constexpr,
    PARTS: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Write the rows of coded pages, `pages_a_layer` of each layer, to where the engine keeps them."""
    tile, page = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, place, known = locate_tile(tile, PAIRS, COLUMNS, GROUPS, EACH)
    target, there = locate_in_cache(
        places, slots, pages_a_layer, cache_rows, page, tile, row,
        ROWS, COLUMNS, EACH, PARTS, HEADS, BLOCK_SIZE, BLOCK_STRIDE, TOKEN_STRIDE, HEAD_STRIDE, ALIGNMENT,
    )  # fmt: skip
    word = _decode_tile(
        coded, halves, words, page, tile, row, place, known,
        GROUPS, PAGE, TOPS, CODES, SIGNS, ESCAPES, EACH,
    )  # fmt: skip
    tl.store(target, word, mask=known & there[:, None])
