# mypy: ignore-errors
"""What runs on the device, in Triton's language: see `lwkv.codecs.lossless_form`.

A program handles EACH groups of 16 rows of one page, a row being PAIRS words of two bf16 elements. All sizes
and offsets are constants, in bytes. The same memory comes as pointers to bytes, halves and words.
Escapes have their places by their order, from prefix sums: the bytes are the same however programs are run.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _places(group, PAIRS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of a group; where its words are in a page, counted in words; which of these there are in a row."""
    row = group * 16 + tl.arange(0, 16)
    pair = tl.arange(0, COLUMNS)
    return row, row[:, None] * PAIRS + pair[None, :], (pair < PAIRS)[None, :] & (row >= 0)[:, None]


@triton.jit
def _ranks(low, high, first):
    """Of 1s in `low` and `high`, row by row and in turn: how many are before each, counted from `first`."""
    both = low + high
    row = tl.sum(both, 1)
    before = first + (tl.cumsum(row, 0) - row)[:, None] + tl.cumsum(both, 1) - both
    return before, before + low


@triton.jit
def _code(top, exponent):
    below = top - exponent
    return tl.where(exponent == 0, 14, tl.where(below <= 13, below, 15))


@triton.jit
def _decode_group(
    coded, halves, words, raw, page, group,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, PAGE: tl.constexpr,
    TOPS: tl.constexpr, CODES: tl.constexpr, SIGNS: tl.constexpr, ESCAPES: tl.constexpr,
):  # fmt: skip
    row, place, wide = _places(group, PAIRS, COLUMNS)
    code = tl.load(coded + page * PAGE + CODES + place, mask=wide, other=0).to(tl.int32)
    sign = tl.load(halves + page * (PAGE // 2) + SIGNS // 2 + place, mask=wide, other=0).to(tl.int32)
    top = tl.load(coded + page * PAGE + TOPS + row).to(tl.int32)[:, None]
    low, high = code & 15, code >> 4
    low_exponent = tl.where(low == 14, 0, (top - low) & 0xFF)
    high_exponent = tl.where(high == 14, 0, (top - high) & 0xFF)
    starts = words + page * (PAGE // 4) + 16 + group
    first, after = tl.load(starts), tl.load(starts + 1)
    if after > first:
        is_low, is_high = low == 15, high == 15
        low_rank, high_rank = _ranks(is_low.to(tl.int32), is_high.to(tl.int32), first)
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
    there = wide & (row < ROWS)[:, None]
    tl.store(raw + page * (ROWS * PAIRS) + place, first_half | second_half, mask=there)


@triton.jit
def decode(
    coded, halves, words, raw,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr, PAGE: tl.constexpr,
    TOPS: tl.constexpr, CODES: tl.constexpr, SIGNS: tl.constexpr, ESCAPES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Write raw pages, words, of coded ones."""
    page = tl.program_id(1).to(tl.int64)
    for i in tl.static_range(EACH):
        group = tl.program_id(0) * EACH + i
        if group < GROUPS:
            _decode_group(
                coded, halves, words, raw, page, group,
                ROWS, PAIRS, COLUMNS, PAGE, TOPS, CODES, SIGNS, ESCAPES,
            )  # fmt: skip


@triton.jit
def _encode_group(
    coded, halves, words, raw, page, group,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, PAGE: tl.constexpr,
    TOPS: tl.constexpr, CODES: tl.constexpr, SIGNS: tl.constexpr,
):  # fmt: skip
    row, place, wide = _places(group, PAIRS, COLUMNS)
    there = wide & (row < ROWS)[:, None]
    word = tl.load(raw + page * (ROWS * PAIRS) + place, mask=there, other=0)
    low_exponent, high_exponent = (word >> 7) & 0xFF, (word >> 23) & 0xFF
    top = tl.maximum(tl.max(low_exponent, 1), tl.max(high_exponent, 1))
    low, high = _code(top[:, None], low_exponent), _code(top[:, None], high_exponent)
    sign = ((word >> 8) & 0x80) | (word & 0x7F) | ((word >> 16) & 0x8000) | ((word >> 8) & 0x7F00)
    tl.store(coded + page * PAGE + TOPS + row, top.to(tl.uint8))
    tl.store(coded + page * PAGE + CODES + place, (low | (high << 4)).to(tl.uint8), mask=wide)
    tl.store(halves + page * (PAGE // 2) + SIGNS // 2 + place, sign.to(tl.int16), mask=wide)
    count = tl.sum(tl.sum((low == 15).to(tl.int32) + (high == 15).to(tl.int32), 1), 0)
    tl.store(words + page * (PAGE // 4) + 16 + group, count)


@triton.jit
def encode(
    coded, halves, words, raw,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr, PAGE: tl.constexpr,
    TOPS: tl.constexpr, CODES: tl.constexpr, SIGNS: tl.constexpr, ESCAPES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Write tops, codes and signs of raw pages, and for every group its number of escapes, not its start."""
    page = tl.program_id(1).to(tl.int64)
    for i in tl.static_range(EACH):
        group = tl.program_id(0) * EACH + i
        if group < GROUPS:
            _encode_group(
                coded, halves, words, raw, page, group, ROWS, PAIRS, COLUMNS, PAGE, TOPS, CODES, SIGNS
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
def _collect_group(
    coded, raw, page, group, first,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, PAGE: tl.constexpr,
    CODES: tl.constexpr, ESCAPES: tl.constexpr,
):  # fmt: skip
    row, place, wide = _places(group, PAIRS, COLUMNS)
    there = wide & (row < ROWS)[:, None]
    word = tl.load(raw + page * (ROWS * PAIRS) + place, mask=there, other=0)
    code = tl.load(coded + page * PAGE + CODES + place, mask=wide, other=0).to(tl.int32)
    is_low, is_high = (code & 15) == 15, (code >> 4) == 15
    low_rank, high_rank = _ranks(is_low.to(tl.int32), is_high.to(tl.int32), first)
    escapes = coded + page * PAGE + ESCAPES
    low_fits, high_fits = is_low & (low_rank < PAGE - ESCAPES), is_high & (high_rank < PAGE - ESCAPES)
    tl.store(escapes + low_rank, ((word >> 7) & 0xFF).to(tl.uint8), mask=low_fits)
    tl.store(escapes + high_rank, ((word >> 23) & 0xFF).to(tl.uint8), mask=high_fits)


@triton.jit
def collect(
    coded, words, raw,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr, PAGE: tl.constexpr,
    CODES: tl.constexpr, ESCAPES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Behind `number`: write the escapes of groups that have some."""
    page = tl.program_id(1).to(tl.int64)
    for i in tl.static_range(EACH):
        group = tl.program_id(0) * EACH + i
        if group < GROUPS:
            starts = words + page * (PAGE // 4) + 16 + group
            first, after = tl.load(starts), tl.load(starts + 1)
            if after > first:
                _collect_group(coded, raw, page, group, first, ROWS, PAIRS, COLUMNS, PAGE, CODES, ESCAPES)
