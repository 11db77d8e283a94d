"""The chunk size of a model: whole blocks of every kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm

from lwkv.errors import ConfigError


@dataclass(frozen=True)
class ChunkSize:
    """Tokens of a chunk, and why.

    Attributes:
        tokens: of a chunk, a multiple of `unit`.
        unit: the least common multiple of all block sizes and of what the engine aligns its hits to.
        configured: what the user asked for.
    """

    tokens: int
    unit: int
    configured: int

    def words(self) -> str:
        """One sentence for the log and for doctor."""
        if self.tokens == self.configured:
            return f"chunks have {self.tokens} tokens, as configured"
        return (
            f"chunks have {self.tokens} tokens instead of the configured {self.configured}: this model's "
            f"blocks need a multiple of {self.unit}"
        )


def choose_chunk_size(configured: int, block_sizes: Iterable[int], alignment: int = 1) -> ChunkSize:
    """Choose the multiple nearest to `configured` that all kinds can be cut at; of two the smaller one.

    Args:
        block_sizes: tokens of a block, of every kind.
        alignment: tokens that the engine's own hits are a multiple of.

    Raises:
        ConfigError: a number below 1.
    """
    sizes = [*block_sizes]
    for name, number in (
        ("chunk_size", configured),
        ("alignment", alignment),
        *(("block", n) for n in sizes),
    ):
        if number < 1:
            raise ConfigError(f"{name}: got {number} tokens; allowed: 1 or more")
    unit = lcm(alignment, *sizes)
    below = configured // unit * unit
    nearest = below if configured - below <= below + unit - configured else below + unit
    return ChunkSize(max(unit, nearest), unit, configured)
