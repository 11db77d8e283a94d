"""The index tensors of one step, built once and used by all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """What one request computes in a step: `tokens` at positions from `start` on, in its `blocks`."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class RequestShare:
    """One request's share of a batch.

    `rows` are its new tokens among the batch's; `blocks`, int64, hold its `num_tokens` tokens so far. `mask`,
    bool (new tokens, num_tokens), says who sees whom; None where plain causal attention says it.
    """

    rows: slice
    blocks: Tensor
    num_tokens: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Batch:
    """All new tokens of a step, T of R requests, on the model's device.

    `tokens`, `positions`, `blocks` and `offsets` are int64 (T,); `last_rows`, int64 (R,), is each request's
    last new token. All positions are below `num_positions`.
    """

    tokens: Tensor
    positions: Tensor
    blocks: Tensor
    offsets: Tensor
    last_rows: Tensor
    shares: tuple[RequestShare, ...]
    num_positions: int


def build_batch(parts: Sequence[Part], block_size: int, device: torch.device) -> Batch:
    """Lay the parts of a step one behind the other; each has a token at least, and blocks for all."""
    positions = torch.cat([torch.arange(part.start, part.end) for part in parts])
    tables = [torch.tensor(part.blocks)[: -(-part.end // block_size)] for part in parts]
    blocks = torch.cat(
        [
            table[torch.arange(part.start, part.end) // block_size]
            for part, table in zip(parts, tables, strict=True)
        ]
    )
    ends = torch.tensor([len(part.tokens) for part in parts]).cumsum(0)
    return Batch(
        tokens=torch.cat([torch.tensor(part.tokens) for part in parts]).to(device),
        positions=positions.to(device),
        blocks=blocks.to(device),
        offsets=(positions % block_size).to(device),
        last_rows=(ends - 1).to(device),
        shares=tuple(
            _share(part, end, table, device)
            for part, end, table in zip(parts, ends.tolist(), tables, strict=True)
        ),
        num_positions=max(part.end for part in parts),
    )


def _share(part: Part, end_row: int, table: Tensor, device: torch.device) -> RequestShare:
    mask = None
    if part.start > 0 and len(part.tokens) > 1:
        own = torch.arange(part.start, part.end, device=device)[:, None]
        mask = torch.arange(part.end, device=device) <= own
    return RequestShare(slice(end_row - len(part.tokens), end_row), table.to(device), part.end, mask)
