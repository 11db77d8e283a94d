# mypy: ignore-errors
"""What decoding and coding on the device share, in Triton's language: see `lwkv.codecs.lossless_form`.

A page's rows are PAIRS words of two bf16 elements each, 16 rows to a group, and EACH groups are a tile, which
is worked on at once. All sizes and offsets are constants, in bytes. The same memory comes as pointers to
bytes, halves and words. Rows are in raw pages, or where the engine keeps them: then `places` has the
addresses of K and V of each layer, and `slots` where each token is in the cache. Escapes have their places by
their order, from prefix sums: the bytes are the same however programs are run.
"""

from __future__ import annotations

import triton
import triton.language as tl

RUNTIME = ("pages_a_layer", "cache_rows")
UNALIGNED = ("places", "slots")


@triton.jit
def locate_tile(tile, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr):
    """Rows of a tile; where its words are in a page, counted in words; which of these there are."""
    row = tile * (16 * EACH) + tl.arange(0, 16 * EACH)
    pair = tl.arange(0, COLUMNS)
    return row, row[:, None] * PAIRS + pair[None, :], (pair < PAIRS)[None, :] & (row < GROUPS * 16)[:, None]


@triton.jit
def locate_rows(
    places, slots, pages_a_layer, cache_rows, page, first_row, row,
    ROWS: tl.constexpr, PARTS: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
):  # fmt: skip
    """For rows of one part, from `first_row` on: its address, how far behind it each is, which exist."""
    TOKENS: tl.constexpr = ROWS // PARTS // HEADS
    layer = page // pages_a_layer
    part = first_row // (TOKENS * HEADS)
    inside = row - part * (TOKENS * HEADS)
    token = (page - layer * pages_a_layer) * TOKENS + inside // HEADS
    slot = tl.load(slots + token, mask=row < ROWS, other=-1)
    head = (inside % HEADS).to(tl.int64)
    start = (slot // BLOCK_SIZE) * BLOCK_STRIDE + (slot % BLOCK_SIZE) * TOKEN_STRIDE + head * HEAD_STRIDE
    return tl.load(places + 2 * layer + part), start, (slot >= 0) & (slot < cache_rows)


@triton.jit
def locate_in_cache(
    places, slots, pages_a_layer, cache_rows, page, tile, row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EACH: tl.constexpr,
    PARTS: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Where the words of a tile, all of them of one part, are in the cache; which rows there are."""
    address, start, there = locate_rows(
        places, slots, pages_a_layer, cache_rows, page, tile * (16 * EACH), row,
        ROWS, PARTS, HEADS, BLOCK_SIZE, BLOCK_STRIDE, TOKEN_STRIDE, HEAD_STRIDE,
    )  # fmt: skip
    cache = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), ALIGNMENT)
    return cache + start[:, None] + tl.arange(0, COLUMNS)[None, :], there


@triton.jit
def rank_escapes(low, high, first):
    """Of 1s in `low` and `high`, row by row and in turn: how many are before each, counted from `first`."""
    both = low + high
    row = tl.sum(both, 1)
    before = first + (tl.cumsum(row, 0) - row)[:, None] + tl.cumsum(both, 1) - both
    return before, before + low


@triton.jit
def count_escapes(words, page, tile, GROUPS: tl.constexpr, PAGE: tl.constexpr, EACH: tl.constexpr):
    """How many escapes are before a tile, and up to its end."""
    starts = words + page * (PAGE // 4) + 16
    return tl.load(starts + tile * EACH), tl.load(starts + tl.minimum((tile + 1) * EACH, GROUPS))
