"""One page size for all kinds, so that none of them has memory of its own."""

from __future__ import annotations

from collections.abc import Sequence

from lwkv.kinds import Kind
from lwkv.pool.host_pool import page_stride

SLACK = 1.05
"""Larger pages are fewer copies: they may take so much more memory than the ones that take least."""


def stored_tokens(kind: Kind, chunk_size: int) -> int:
    """Tokens at the end of a chunk that are kept of it; 0 where no boundary needs any.

    Of chunked local attention all: what is needed differs from chunk to chunk.
    """
    return chunk_size if kind.form == "local" else chunk_size - kind.first_stored(0, chunk_size)


def choose_pieces(kinds: Sequence[Kind], chunk_size: int) -> tuple[int, list[int]]:
    """Choose the bytes of a page, and the tokens of a piece of each kind.

    What a kind stores of a chunk is cut into pieces of whole blocks, one page a layer and piece. Pages are as
    large as possible as long as a chunk of all kinds takes little more than with the best size.

    Returns:
        bytes of a page; for each kind the tokens of a piece, which divide `stored_tokens`.
    """
    blocks = [max(1, stored_tokens(kind, chunk_size) // kind.block_size) for kind in kinds]
    pairs = list(zip(kinds, blocks, strict=True))
    least = max(kind.block_bytes for kind in kinds)
    sizes = {n * kind.block_bytes for kind, most in pairs for n in range(1, most + 1) if most % n == 0}
    costs = {size: sum(_cost(*pair, size) for pair in pairs) for size in sizes if size >= least}
    best = min(costs.values())
    size = max(size for size, cost in costs.items() if cost <= SLACK * best)
    return size, [kind.block_size * _piece_blocks(kind, most, size) for kind, most in pairs]


def _piece_blocks(kind: Kind, blocks: int, page_bytes: int) -> int:
    """The largest part of so many blocks that fits a page and divides them."""
    return max(n for n in range(1, blocks + 1) if blocks % n == 0 and n * kind.block_bytes <= page_bytes)


def _cost(kind: Kind, blocks: int, page_bytes: int) -> int:
    """Bytes of host memory that a chunk takes in all layers."""
    pieces = blocks // _piece_blocks(kind, blocks, page_bytes)
    return pieces * kind.num_layers * page_stride(page_bytes)
