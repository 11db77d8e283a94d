"""One page size for all kinds."""

from __future__ import annotations

import pytest
from hypothesis import given
from kinds.kind_strategies import models

from lwkv.hybrid.page_size import choose_pieces, stored_tokens
from lwkv.kinds import Kind
from lwkv.pool.host_pool import page_stride

KIB = 1 << 10


@pytest.mark.parametrize(
    ("model", "chunk_size", "page_bytes", "tokens"),
    [
        # Gemma-3-27B: 16 KV heads of 128 in bf16; a window of 1024.
        (
            [
                Kind("full", 16, 10, 16 * 8192),
                Kind("window", 16, 52, 16 * 8192, span=1024),
            ],
            256,
            2048 * KIB,
            [256, 256],
        ),
        # gpt-oss: 8 heads of 64; a window of 128, half a chunk.
        (
            [Kind("full", 16, 18, 16 * 2048), Kind("window", 16, 18, 16 * 2048, span=128)],
            256,
            256 * KIB,
            [128, 128],
        ),
        # Qwen3-Next: a block of 544 tokens of full attention holds a state of 1,064 KiB with some room.
        (
            [Kind("full", 544, 12, 544 * 2048), Kind("state", 544, 36, 1064 * KIB)],
            544,
            1088 * KIB,
            [544, 544],
        ),
    ],
)
def test_the_models_that_people_run_need_one_size(model, chunk_size, page_bytes, tokens) -> None:
    assert choose_pieces(model, chunk_size) == (page_bytes, tokens)


@given(models())
def test_pieces_are_whole_blocks_that_fit_a_page_and_fill_what_is_stored(model) -> None:
    kinds, chunk_size = model
    page_bytes, tokens = choose_pieces(kinds, chunk_size)
    for kind, piece in zip(kinds, tokens, strict=True):
        stored = stored_tokens(kind, chunk_size) or kind.block_size
        assert piece % kind.block_size == 0 == stored % piece
        assert piece // kind.block_size * kind.block_bytes <= page_bytes


@given(models())
def test_no_other_size_takes_much_less_memory(model) -> None:
    kinds, chunk_size = model
    chosen, _ = choose_pieces(kinds, chunk_size)

    def cost(page_bytes: int) -> int:
        total = 0
        for kind in kinds:
            blocks = max(1, stored_tokens(kind, chunk_size) // kind.block_size)
            fit = max(
                n for n in range(1, blocks + 1) if blocks % n == 0 and n * kind.block_bytes <= page_bytes
            )
            total += blocks // fit * kind.num_layers * page_stride(page_bytes)
        return total

    least = max(kind.block_bytes for kind in kinds)
    assert cost(chosen) <= 1.05 * min(cost(size) for size in range(least, 8 * chunk_size + 8, 8))
