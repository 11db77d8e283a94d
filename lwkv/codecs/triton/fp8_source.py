# mypy: ignore-errors
"""fp8 on the device, in Triton's language: see `lwkv.codecs.fp8_form`.

A program has a tile: EACH rows of WIDTH elements of a KIND, COLUMNS with those up to a power of two.
All sizes and offsets are constants, in bytes but for those. Elements come as whole numbers of their size.
Rows are in raw pages, or where the engine keeps them: see `lwkv.codecs.triton.tiles`. Whole numbers only, so
that all devices write the same bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lwkv.codecs.triton.tiles import RUNTIME, UNALIGNED, locate_rows


@triton.jit
def _locate(tile, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, EACH: tl.constexpr):
    """Rows of a tile; where its elements are in a page; which of these there are."""
    row = tile * EACH + tl.arange(0, EACH)
    column = tl.arange(0, COLUMNS)
    return row, row[:, None] * WIDTH + column[None, :], (column < WIDTH)[None, :] & (row < ROWS)[:, None]


@triton.jit
def _locate_in_cache(
    places, slots, pages_a_layer, cache_rows, page, tile, row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EACH: tl.constexpr, KIND: tl.constexpr,
    PARTS: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Where the elements of a tile, all of them of one part, are in the cache; which rows there are."""
    address, start, there = locate_rows(
        places, slots, pages_a_layer, cache_rows, page, tile * EACH, row,
        ROWS, PARTS, HEADS, BLOCK_SIZE, BLOCK_STRIDE, TOKEN_STRIDE, HEAD_STRIDE,
    )  # fmt: skip
    if KIND == 3:
        cache = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), ALIGNMENT)
    else:
        cache = tl.multiple_of(address.to(tl.pointer_type(tl.int16)), ALIGNMENT)
    return cache + start[:, None] + tl.arange(0, COLUMNS)[None, :], there


@triton.jit
def _float32_bits(element, KIND: tl.constexpr):
    """Elements as float32 of the same value."""
    if KIND == 1:
        bits = element.to(tl.int32) << 16
    elif KIND == 2:
        bits = element.to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    else:
        bits = element
    return bits


@triton.jit
def _elements(bits, KIND: tl.constexpr):
    """The opposite. Devices turn NaN into different NaNs of float16: here it is one.

    NaN is found by its size: where it is compared with the very value that it has here, the compiler finds
    that its own conversion gives the same, and leaves the choice out.
    """
    if KIND == 1:
        element = (bits >> 16).to(tl.int16)
    elif KIND == 2:
        half = bits.to(tl.float32, bitcast=True).to(tl.float16).to(tl.int16, bitcast=True)
        element = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7E00, half.to(tl.int32)).to(tl.int16)
    else:
        element = bits
    return element


@triton.jit
def _top(magnitude, LARGEST: tl.constexpr):
    """The exponent of each row's largest finite element, rounded to four significant bits."""
    largest = tl.max(tl.where(magnitude < 0x7F800000, magnitude, 0), 1)
    return tl.minimum((largest + 0x7FFFF + ((largest >> 20) & 1)) >> 23, LARGEST)


@triton.jit
def _code(bits, magnitude, top):
    below = top - (magnitude >> 23)
    # To the nearest, ties to even: 20 bits are cut off, and more below e4m3's smallest exponent.
    cut = tl.minimum(tl.maximum(below - 13, 0), 5) + 20
    significand = (magnitude & 0x7FFFFF) | 0x800000
    rounded = (significand + (1 << (cut - 1)) - 1 + ((significand >> cut) & 1)) >> cut
    code = tl.minimum(rounded + ((tl.maximum(14 - below, 1) - 1) << 3), 0x77)
    code = tl.where(magnitude < 0x800000, 0, tl.where(magnitude == 0x7F800000, 0x78, code))
    return tl.where(magnitude > 0x7F800000, 0x7F, code | ((bits >> 24) & 0x80))


@triton.jit
def _value(code, top):
    """The float32 bits of what is coded; of what would be a denormal, zero."""
    magnitude = code & 0x7F
    exponent = magnitude >> 3
    significand = (magnitude & 7) | tl.where(exponent > 0, 8, 0)
    as_float = significand.to(tl.float32).to(tl.int32, bitcast=True)
    total = (as_float >> 23) + tl.maximum(exponent, 1) + top - 144
    value = (as_float & 0x7FFFFF) | (tl.minimum(tl.maximum(total, 0), 254) << 23)
    value = tl.where((total <= 0) | (significand == 0), 0, value)
    value = tl.where(magnitude == 0x78, 0x7F800000, value)
    return tl.where(magnitude > 0x78, 0x7FC00000, value | ((code & 0x80) << 24))


@triton.jit
def _write_frame(
    coded, words, page,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, TOPS: tl.constexpr, CODES: tl.constexpr,
    KIND: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, VERSION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A page's header, and zeros behind its tops and behind its codes."""
    word = tl.arange(0, 16)
    header = tl.where(word == 0, FIRST, tl.where(word == 1, SECOND, tl.where(word == 2, VERSION, 0)))
    header += tl.where(word == 3, ROWS, tl.where(word == 4, WIDTH, tl.where(word == 5, KIND, 0)))
    tl.store(words + page * (PAGE // 4) + word, header)
    index = tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK], tl.uint8)
    for begin in range(TOPS + ROWS, CODES, BLOCK):
        tl.store(coded + page * PAGE + begin + index, zeros, mask=begin + index < CODES)
    for begin in range(CODES + ROWS * WIDTH, PAGE, BLOCK):
        tl.store(coded + page * PAGE + begin + index, zeros, mask=begin + index < PAGE)


@triton.jit
def _encode_tile(
    element, coded, words, page, tile, row, place, known,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, TOPS: tl.constexpr, CODES: tl.constexpr,
    KIND: tl.constexpr, LARGEST: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, VERSION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    bits = _float32_bits(element, KIND)
    magnitude = bits & 0x7FFFFFFF
    top = _top(magnitude, LARGEST)
    tl.store(coded + page * PAGE + TOPS + row, top.to(tl.uint8), mask=row < ROWS)
    code = _code(bits, magnitude, top[:, None])
    tl.store(coded + page * PAGE + CODES + place, code.to(tl.uint8), mask=known)
    if tile == 0:
        _write_frame(coded, words, page, ROWS, WIDTH, PAGE, TOPS, CODES, KIND, FIRST, SECOND, VERSION, BLOCK)


@triton.jit
def _decode_tile(
    coded, page, row, place, known,
    ROWS: tl.constexpr, PAGE: tl.constexpr, TOPS: tl.constexpr, CODES: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The elements of a tile."""
    code = tl.load(coded + page * PAGE + CODES + place, mask=known, other=0).to(tl.int32)
    top = tl.load(coded + page * PAGE + TOPS + row, mask=row < ROWS, other=0).to(tl.int32)
    return _elements(_value(code, top[:, None]), KIND)


@triton.jit
def encode(
    coded, words, raw,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PAGE: tl.constexpr,
    TOPS: tl.constexpr, CODES: tl.constexpr, KIND: tl.constexpr, EACH: tl.constexpr,
    LARGEST: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, VERSION: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write coded pages of raw ones."""
    tile, page = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, place, known = _locate(tile, ROWS, WIDTH, COLUMNS, EACH)
    element = tl.load(raw + page * (ROWS * WIDTH) + place, mask=known, other=0)
    _encode_tile(
        element, coded, words, page, tile, row, place, known,
        ROWS, WIDTH, PAGE, TOPS, CODES, KIND, LARGEST, FIRST, SECOND, VERSION, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=UNALIGNED)
def encode_from_cache(
    coded, words, places, slots, pages_a_layer, cache_rows,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PAGE: tl.constexpr,
    TOPS: tl.constexpr, CODES: tl.constexpr, KIND: tl.constexpr, EACH: tl.constexpr,
    PARTS: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    LARGEST: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, VERSION: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """As `encode`, of rows that are where the engine keeps them: zeros of those that do not exist."""
    tile, page = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, place, known = _locate(tile, ROWS, WIDTH, COLUMNS, EACH)
    source, there = _locate_in_cache(
        places, slots, pages_a_layer, cache_rows, page, tile, row, ROWS, COLUMNS, EACH, KIND,
        PARTS, HEADS, BLOCK_SIZE, BLOCK_STRIDE, TOKEN_STRIDE, HEAD_STRIDE, ALIGNMENT,
    )  # fmt: skip
    element = tl.load(source, mask=known & there[:, None], other=0)
    _encode_tile(
        element, coded, words, page, tile, row, place, known,
        ROWS, WIDTH, PAGE, TOPS, CODES, KIND, LARGEST, FIRST, SECOND, VERSION, BLOCK,
    )  # fmt: skip


@triton.jit
def decode(
    coded, raw,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PAGE: tl.constexpr,
    TOPS: tl.constexpr, CODES: tl.constexpr, KIND: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Write raw pages of coded ones."""
    tile, page = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, place, known = _locate(tile, ROWS, WIDTH, COLUMNS, EACH)
    element = _decode_tile(coded, page, row, place, known, ROWS, PAGE, TOPS, CODES, KIND)
    tl.store(raw + page * (ROWS * WIDTH) + place, element, mask=known)


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=UNALIGNED)
def decode_to_cache(
    coded, places, slots, pages_a_layer, cache_rows,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PAGE: tl.constexpr,
    TOPS: tl.constexpr, CODES: tl.constexpr, KIND: tl.constexpr, EACH: tl.constexpr,
    PARTS: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Write the rows of coded pages, `pages_a_layer` of each layer, to where the engine keeps them."""
    tile, page = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, place, known = _locate(tile, ROWS, WIDTH, COLUMNS, EACH)
    target, there = _locate_in_cache(
        places, slots, pages_a_layer, cache_rows, page, tile, row, ROWS, COLUMNS, EACH, KIND,
        PARTS, HEADS, BLOCK_SIZE, BLOCK_STRIDE, TOKEN_STRIDE, HEAD_STRIDE, ALIGNMENT,
    )  # fmt: skip
    element = _decode_tile(coded, page, row, place, known, ROWS, PAGE, TOPS, CODES, KIND)
    tl.store(target, element, mask=known & there[:, None])
