"""One task by full prefill and by blends: how far apart the predictions of the answer's tokens are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import kl_div

from lwkv.benchmarks.blend_tasks import HEAD, Task
from lwkv.blend import Blender, BlendRequest, Selector
from lwkv.config import Config
from lwkv.connectors import Rope
from lwkv.engine import CacheEngine
from lwkv.reference import Model, NoCache, PagedCache, Tokenizer, forward, open_cache_engine
from lwkv.reference.batch import Part, build_batch
from lwkv.reference.blending import ReferenceBlend

ANSWER_TOKENS = 8
BLOCK_SIZE = 16
NUM_BLOCKS = 160
SEPARATOR = " # #"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way's answer: mean KL divergence of the full prefill's predictions from it, in nats.

    `seconds` are of the process, for the prefill alone; `text` is its own greedy first token and the full
    prefill's others. `num_computed` counts rows of all kinds that were computed in the last layer.
    """

    kl: float
    seconds: float
    num_computed: int
    num_tokens: int


class Unmoved(ReferenceBlend):
    """The model, with keys left at the positions they were stored with."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.rope = Rope((0.0,) * len(self.rope.frequencies))


class Trial:
    """A model with one task after the other; the caller closes it."""

    def __init__(self, model: Model, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.cache = PagedCache(
            model.shape, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=model.dtype, device=model.device
        )
        config = Config(
            use_layerwise=True,
            enable_blending=True,
            chunk_size=128,
            max_local_cpu_size=0.5,
            blend_min_tokens=0,
        )
        self.engine: CacheEngine = open_cache_engine(config, model, self.cache, "trial")
        self.head = tokenizer.encode(f"<|im_start|>system\n{HEAD}<|im_end|>\n<|im_start|>user\n")
        self._separator = tokenizer.encode(SEPARATOR)

    def close(self) -> None:
        self.engine.close()

    def begin(self, task: Task) -> None:
        """Compute the task in full."""
        self._documents = [self.tokenizer.encode(" " + text) for text in task.documents]
        ending = f"\n{task.question}<|im_end|>\n<|im_start|>assistant\n{task.opening}"
        self.tokens, self._segments = list(self.head), []
        for document in self._documents:
            self._segments.append((len(self.tokens), len(self.tokens) + len(document)))
            self.tokens += [*document, *self._separator]
        self.tokens += self.tokenizer.encode(ending)
        self._blocks = np.random.default_rng(0).permutation(NUM_BLOCKS)
        start = time.process_time()
        logits = [self._forward(self.tokens, 0)[-1:]]
        self.full_seconds = time.process_time() - start
        self.answer: list[int] = []
        while True:
            self.answer.append(int(logits[-1].argmax()))
            if len(self.answer) == ANSWER_TOKENS:
                break
            logits.append(self._forward(self.answer[-1:], len(self.tokens) + len(self.answer) - 1))
        self._wanted = torch.cat(logits).log_softmax(-1)

    def encode(self, shared: bool) -> None:
        """Cache the task's documents, computed alone or behind the head."""
        blender = self._blender(shared)
        num = len(blender.segments.shared_prefix)
        for document in self._documents:
            blender.encode(document, np.arange(num + len(document)))
        if not self.engine.flush():
            raise RuntimeError("the documents were not stored within 30 s")

    def blend(self, selector: Selector, share: float, shared: bool, moved: bool = True) -> Outcome:
        """Blend the task's prompt and follow the full prefill's answer."""
        blender = self._blender(shared, moved, selector=selector, share=share)
        slots = self._slots(len(self.tokens))
        self.cache.fill(float("nan"))
        start = time.process_time()
        (found,) = blender.prefill([BlendRequest(self.tokens, slots, self._segments)])
        seconds = time.process_time() - start
        rest = self._forward(self.answer[:-1], len(self.tokens))
        logits = torch.cat([found.logits[None], rest]).log_softmax(-1)
        kl = float(kl_div(logits, self._wanted, log_target=True, reduction="none").sum(-1).mean())
        return Outcome(kl, seconds, found.num_chosen + found.num_computed, len(self.tokens))

    def _blender(self, shared: bool, moved: bool = True, **options: object) -> Blender:
        model = ReferenceBlend(self.model) if moved else Unmoved(self.model)
        return Blender(self.engine, model, shared_prefix=self.head if shared else (), **options)  # type: ignore[arg-type]

    def _slots(self, count: int) -> np.ndarray:
        at = np.arange(count)
        return self._blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE

    def _forward(self, tokens: Sequence[int], start: int) -> Tensor:
        """Compute tokens at positions from `start` on, over what is in the cache; the logits of each."""
        batch = build_batch([Part(tokens, start, self._blocks.tolist())], BLOCK_SIZE, self.model.device)
        everyone = torch.arange(len(tokens), device=self.model.device)
        return forward(self.model, self.cache, replace(batch, last_rows=everyone), NoCache())
