"""What the benchmark of blends has each rank of tensor parallel do, and what they say together."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch

from lwkv.benchmarks.vllm.blend_parts import Parts
from lwkv.integrations.vllm.blending.worker.blend_pass import BlendPass
from lwkv.integrations.vllm.blending.worker_extension import NoteModel

EXTENSION = f"{__name__}.BlendRank"
"""For `--worker-extension-cls`: vLLM's workers then have the methods of `BlendRank`."""

MOST_APART = 0.25
"""By which log-probabilities may differ that were computed in bfloat16 in another order."""


class BlendRank(NoteModel):
    """One rank's part. Its methods are called by name, with what can be written as JSON."""

    model_runner: Any

    def blend_select(self, name: str, share: float) -> None:
        """Choose by the selector of that name from now on."""
        from lwkv.benchmarks.vllm_blend import selectors

        parts = Parts()
        passes = self._passes = list[BlendPass]()
        worker, make = parts._worker, type(parts._worker)._pass

        def noted(*given: Any) -> BlendPass:
            made: BlendPass = make(worker, *given)
            passes.append(made)
            return made

        worker._pass = noted
        parts.select(selectors(share or 0.15, worker._layers.num_layers)[name], share)

    def blend_chosen(self) -> list[str]:
        """For each blend since the selection, what stands for the rows that it computed in the last layer."""
        return [blake2b(one._positions.tobytes(), digest_size=16).hexdigest() for one in self._passes]

    def blend_counts(self) -> dict[str, float]:
        """The rank's counters of blending."""
        return Parts().counts()

    def blend_flush(self) -> bool:
        """Wait until all that was stored can be found."""
        return Parts().flush()

    @torch.no_grad()
    def blend_fill(self, seed: int) -> None:
        """Give the model weights with which every token matters: those of vLLM's dummies are nearly 0."""
        for number, weight in enumerate(self.model_runner.model.parameters()):
            if weight.ndim == 1:
                weight.fill_(1.0)
                continue
            drawn = torch.Generator(device=weight.device).manual_seed(1000 * seed + number)
            weight.normal_(0.0, 0.02, generator=drawn)


class AllRanks:
    """In the place of `Parts` where workers are other processes: what can be asked of all of them."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def select(self, name: str, share: float) -> None:
        self._llm.collective_rpc("blend_select", args=(name, share))

    def counts(self) -> dict[str, float]:
        """Of the first rank."""
        counts: dict[str, float] = self._llm.collective_rpc("blend_counts")[0]
        return counts

    def flush(self) -> bool:
        return all(self._llm.collective_rpc("blend_flush"))

    def fill(self, seed: int) -> None:
        self._llm.collective_rpc("blend_fill", args=(seed,))

    def faults(self, num_blends: int) -> list[str]:
        """Where ranks have not computed the same rows, or another number of blends than was asked for."""
        return faults(self._llm.collective_rpc("blend_chosen"), num_blends)


def faults(chosen: Sequence[Sequence[str]], num_blends: int) -> list[str]:
    """What is wrong with what each rank says of the rows that it computed, blend by blend."""
    numbers = [len(mine) for mine in chosen]
    if numbers != [num_blends] * len(chosen):
        return [f"ranks have blended {numbers} prompts, and {num_blends} were asked for"]
    apart = [blend for blend, rows in enumerate(zip(*chosen, strict=True)) if len(set(rows)) > 1]
    return [f"ranks have computed other rows in blends {apart}"] if apart else []


def apart(own: dict[int, float], others: dict[int, float]) -> float:
    """The largest difference of log-probabilities of tokens that both have; infinite for none."""
    both = own.keys() & others.keys()
    return max((abs(own[token] - others[token]) for token in both), default=float("inf"))
