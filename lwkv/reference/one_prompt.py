"""One prompt at a time, computed step by step over a paged cache: what is compared with what is loaded."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from lwkv.reference.batch import Part, build_batch
from lwkv.reference.cache import PagedCache
from lwkv.reference.forward import forward
from lwkv.reference.hooks import NoCache
from lwkv.reference.model.llama import Model
from lwkv.reference.request import block_slots

BLOCK_SIZE = 16


class OnePrompt:
    """A model with a cache for one prompt and its answer; the next prompt takes their place.

    Args:
        longest: tokens of the longest prompt with its answer.
    """

    def __init__(self, model: Model, longest: int) -> None:
        num_blocks = -(-longest // BLOCK_SIZE)
        self.model = model
        self.cache = PagedCache(
            model.shape,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            dtype=model.dtype,
            device=model.device,
        )
        # Falling, so that nothing works only where blocks happen to be in order.
        self._blocks = list(range(num_blocks))[::-1]

    def slots(self, count: int) -> Tensor:
        """Where the first tokens are: int64 (count,), CPU."""
        return block_slots(self._blocks, count, BLOCK_SIZE)

    def compute(self, tokens: Sequence[int], start: int) -> Tensor:
        """Compute tokens at positions from `start` on, over what is in the cache.

        Returns the logits of each: [tokens, vocabulary].
        """
        batch = build_batch([Part(tokens, start, self._blocks)], BLOCK_SIZE, self.model.device)
        everyone = torch.arange(len(tokens), device=self.model.device)
        return forward(self.model, self.cache, replace(batch, last_rows=everyone), NoCache())

    def decode(
        self, num_tokens: int, first: int, most: int, stop_tokens: Collection[int]
    ) -> tuple[list[int], Tensor]:
        """The greedy answer to a prompt of `num_tokens` that begins with the token `first`: `most` at most.

        Returns its tokens, `first` among them, and the logits of all but the first: [tokens - 1, vocabulary].
        """
        tokens, logits = [first], [torch.zeros(0, self.model.shape.vocab_size, device=self.model.device)]
        while len(tokens) < most and tokens[-1] not in stop_tokens:
            logits.append(self.compute(tokens[-1:], num_tokens + len(tokens) - 1))
            tokens.append(int(logits[-1].argmax()))
        return tokens, torch.cat(logits)


def divergence(found: Tensor, wanted: Tensor) -> float:
    """The mean KL divergence of predictions from the wanted ones, in nats: logits [tokens, vocabulary]."""
    ours, theirs = (logits.float().log_softmax(-1) for logits in (found, wanted))
    return float(kl_div(ours, theirs, log_target=True, reduction="none").sum(-1).mean().clamp_min(0))
