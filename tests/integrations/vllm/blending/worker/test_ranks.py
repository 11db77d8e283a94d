"""Ranks in processes of their own agree on numbers."""

from __future__ import annotations

import torch
import torch.distributed
import torch.multiprocessing
from storage.servers import free_port

from lwkv.integrations.vllm.blending.worker.ranks import Ranks


class Group:
    """As much of vLLM's group as is used."""

    def __init__(self, rank: int, port: int) -> None:
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
        )
        self.world_size = 2
        self.cpu_group = torch.distributed.group.WORLD

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(input_)
        return input_

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        torch.distributed.broadcast(input_, src)
        return input_


def agree(rank: int, port: int) -> None:
    ranks = Ranks(Group(rank, port))
    assert ranks.are_several
    assert ranks.least([3, rank, 5 - rank]) == [3, 0, 4]
    assert ranks.total(torch.tensor([3.0, 1.0 + rank])).tolist() == [6.0, 3.0]
    torch.distributed.destroy_process_group()


def test_two_ranks_sum_scores_and_take_the_least_of_counts() -> None:
    torch.multiprocessing.spawn(agree, (free_port(),), nprocs=2)


def test_one_rank_asks_nobody() -> None:
    ranks = Ranks()
    assert not ranks.are_several
    assert ranks.least([3, 1]) == [3, 1]
    scores = torch.tensor([1.0, 2.0])
    assert ranks.total(scores) is scores
