"""What ranks of tensor parallel agree on: each has some of the heads, and all compute the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp


class RankGroup(Protocol):
    """As much of vLLM's group of ranks as is used."""

    world_size: int
    cpu_group: ProcessGroup

    def all_reduce(self, input_: Tensor) -> Tensor: ...

    def broadcast(self, input_: Tensor, src: int = 0) -> Tensor: ...


class Ranks:
    """Agrees on numbers. All ranks make the same calls in the same order, and each waits for the others.

    Args:
        group: of tensor parallel; None where there is one rank.
    """

    def __init__(self, group: RankGroup | None = None) -> None:
        self._group = group if group is not None and group.world_size > 1 else None

    @property
    def are_several(self) -> bool:
        """Whether a rank that stops would have others wait for it."""
        return self._group is not None

    def total(self, scores: Tensor) -> Tensor:
        """The sum over all ranks of each of `scores`, on the device; the same bits on every rank."""
        if self._group is None:
            return scores
        # A sum may be rounded in another order on each rank, and one row chosen otherwise is one too many.
        return self._group.broadcast(self._group.all_reduce(scores.contiguous()).contiguous(), src=0)

    def least(self, counts: Sequence[int]) -> list[int]:
        """The least over all ranks of each of `counts`. The host waits for all ranks."""
        if self._group is None:
            return list(counts)
        agreed = torch.tensor(counts, dtype=torch.int64)
        torch.distributed.all_reduce(agreed, op=ReduceOp.MIN, group=self._group.cpu_group)
        return [int(count) for count in agreed]
