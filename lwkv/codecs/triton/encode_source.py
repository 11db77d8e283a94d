# mypy: ignore-errors
"""Coding on the device, in Triton's language: see `lwkv.codecs.triton.tiles`."""

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
def _code(top, exponent):
    below = top - exponent
    return tl.where(exponent == 0, 14, tl.where(below <= 13, below, 15))


@triton.jit
def _load_raw(
    raw, page, row, place, known, ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """The words of a tile of a raw page: zeros where there are none."""
    return tl.load(raw + page * (ROWS * PAIRS) + place, mask=known & (row < ROWS)[:, None], other=0)


@triton.jit
def _load_cached(
    places, slots, pages_a_layer, cache_rows, page, tile, row, known,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EACH: tl.constexpr,
    PARTS: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """The words of a tile from where the engine keeps them: zeros where there are none."""
    source, there = locate_in_cache(
        places, slots, pages_a_layer, cache_rows, page, tile, row,
        ROWS, COLUMNS, EACH, PARTS, HEADS, BLOCK_SIZE, BLOCK_STRIDE, TOKEN_STRIDE, HEAD_STRIDE, ALIGNMENT,
    )  # fmt: skip
    return tl.load(source, mask=known & there[:, None], other=0)


@triton.jit
def _encode_tile(
    word, coded, halves, words, page, tile, row, place, known,
    GROUPS: tl.constexpr, PAGE: tl.constexpr, TOPS: tl.constexpr, CODES: tl.constexpr, SIGNS: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    """Write tops, codes and signs of a tile, and for each group its number of escapes, not its start."""
    low_exponent, high_exponent = (word >> 7) & 0xFF, (word >> 23) & 0xFF
    top = tl.maximum(tl.max(low_exponent, 1), tl.max(high_exponent, 1))
    low, high = _code(top[:, None], low_exponent), _code(top[:, None], high_exponent)
    sign = ((word >> 8) & 0x80) | (word & 0x7F) | ((word >> 16) & 0x8000) | ((word >> 8) & 0x7F00)
    tl.store(coded + page * PAGE + TOPS + row, top.to(tl.uint8), mask=row < GROUPS * 16)
    tl.store(coded + page * PAGE + CODES + place, (low | (high << 4)).to(tl.uint8), mask=known)
    tl.store(halves + page * (PAGE // 2) + SIGNS // 2 + place, sign.to(tl.int16), mask=known)
    in_row = tl.sum((low == 15).to(tl.int32) + (high == 15).to(tl.int32), 1)
    in_group = tl.sum(tl.reshape(in_row, (EACH, 16)), 1)
    group = tile * EACH + tl.arange(0, EACH)
    tl.store(words + page * (PAGE // 4) + 16 + group, in_group, mask=group < GROUPS)


@triton.jit
def encode(
    coded, halves, words, raw,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr, PAGE: tl.constexpr,
    TOPS: tl.constexpr, CODES: tl.constexpr, SIGNS: tl.constexpr, ESCAPES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Write what is coded of raw pages, but for header, starts and escapes: `number` and `collect` follow."""
    tile, page = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, place, known = locate_tile(tile, PAIRS, COLUMNS, GROUPS, EACH)
    word = _load_raw(raw, page, row, place, known, ROWS, PAIRS)
    _encode_tile(
        word, coded, halves, words, page, tile, row, place, known, GROUPS, PAGE, TOPS, CODES, SIGNS, EACH
    )


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=UNALIGNED)
def encode_from_cache(
    coded, halves, words, places, slots, pages_a_layer, cache_rows,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr, PAGE: tl.constexpr,
    TOPS: tl.constexpr, CODES: tl.constexpr, SIGNS: tl.constexpr, ESCAPES: tl.constexpr, EACH: tl.constexpr,
    PARTS: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """As `encode`, of rows that are where the engine keeps them."""
    tile, page = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, place, known = locate_tile(tile, PAIRS, COLUMNS, GROUPS, EACH)
    word = _load_cached(
        places, slots, pages_a_layer, cache_rows, page, tile, row, known,
        ROWS, COLUMNS, EACH, PARTS, HEADS, BLOCK_SIZE, BLOCK_STRIDE, TOKEN_STRIDE, HEAD_STRIDE, ALIGNMENT,
    )  # fmt: skip
    _encode_tile(
        word, coded, halves, words, page, tile, row, place, known, GROUPS, PAGE, TOPS, CODES, SIGNS, EACH
    )


@triton.jit
def number(
    coded, words,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, GROUPS: tl.constexpr, STARTS: tl.constexpr,
    PAGE: tl.constexpr, ESCAPES: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, VERSION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Behind `encode`: make starts of the numbers; write a page's header and zeros behind its escapes."""
    page = tl.program_id(0).to(tl.int64)
    total = tl.sum(tl.zeros([BLOCK], tl.int32), 0)
    index = tl.arange(0, BLOCK)
    starts = words + page * (PAGE // 4) + 16
    for begin in range(0, STARTS, BLOCK):
        group = begin + index
        count = tl.load(starts + group, mask=group < GROUPS, other=0)
        tl.store(starts + group, total + tl.cumsum(count, 0) - count, mask=group < STARTS)
        total += tl.sum(count, 0)
    word = tl.arange(0, 16)
    header = tl.where(word == 0, FIRST, tl.where(word == 1, SECOND, tl.where(word == 2, VERSION, 0)))
    header += tl.where(word == 3, ROWS, tl.where(word == 4, 2 * PAIRS, tl.where(word == 5, total, 0)))
    tl.store(words + page * (PAGE // 4) + word, header)
    for begin in range(0, PAGE - ESCAPES, BLOCK):
        place = begin + index
        there = (place >= total) & (place < PAGE - ESCAPES)
        tl.store(coded + page * PAGE + ESCAPES + place, tl.zeros([BLOCK], tl.uint8), mask=there)


@triton.jit
def _collect_tile(
    word, coded, page, place, known, first,
    PAGE: tl.constexpr, CODES: tl.constexpr, ESCAPES: tl.constexpr,
):  # fmt: skip
    code = tl.load(coded + page * PAGE + CODES + place, mask=known, other=0).to(tl.int32)
    is_low, is_high = (code & 15) == 15, (code >> 4) == 15
    low_rank, high_rank = rank_escapes(is_low.to(tl.int32), is_high.to(tl.int32), first)
    escapes = coded + page * PAGE + ESCAPES
    low_fits, high_fits = is_low & (low_rank < PAGE - ESCAPES), is_high & (high_rank < PAGE - ESCAPES)
    tl.store(escapes + low_rank, ((word >> 7) & 0xFF).to(tl.uint8), mask=low_fits)
    tl.store(escapes + high_rank, ((word >> 23) & 0xFF).to(tl.uint8), mask=high_fits)


@triton.jit
def collect(
    coded, halves, words, raw,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr, PAGE: tl.constexpr,
    TOPS: tl.constexpr, CODES: tl.constexpr, SIGNS: tl.constexpr, ESCAPES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Behind `number`: write the escapes of tiles that have some."""
    tile, page = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, after = count_escapes(words, page, tile, GROUPS, PAGE, EACH)
    if after > first:
        row, place, known = locate_tile(tile, PAIRS, COLUMNS, GROUPS, EACH)
        word = _load_raw(raw, page, row, place, known, ROWS, PAIRS)
        _collect_tile(word, coded, page, place, known, first, PAGE, CODES, ESCAPES)


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=UNALIGNED)
def collect_from_cache(
    coded, halves, words, places, slots, pages_a_layer, cache_rows,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr, PAGE: tl.constexpr,
    TOPS: tl.constexpr, CODES: tl.constexpr, SIGNS: tl.constexpr, ESCAPES: tl.constexpr, EACH: tl.constexpr,
    PARTS: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """As `collect`, of rows that are where the engine keeps them."""
    tile, page = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, after = count_escapes(words, page, tile, GROUPS, PAGE, EACH)
    if after > first:
        row, place, known = locate_tile(tile, PAIRS, COLUMNS, GROUPS, EACH)
        word = _load_cached(
            places, slots, pages_a_layer, cache_rows, page, tile, row, known,
            ROWS, COLUMNS, EACH, PARTS, HEADS, BLOCK_SIZE, BLOCK_STRIDE, TOKEN_STRIDE, HEAD_STRIDE, ALIGNMENT,
        )  # fmt: skip
        _collect_tile(word, coded, page, place, known, first, PAGE, CODES, ESCAPES)
