"""One question over several documents, by full prefill and by blends: how far apart their answers are."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from lwkv.blend import Blended, Blender, BlendRequest, Segment, Selector, SharedPrefix
from lwkv.config.settings import Config
from lwkv.connectors import Rope
from lwkv.engine import CacheEngine
from lwkv.platforms import Platform
from lwkv.reference import Model, Tokenizer, open_cache_engine
from lwkv.reference.blending import ReferenceBlend
from lwkv.reference.one_prompt import OnePrompt, divergence

CHUNK_SIZE = 128
_BETWEEN = "\n\n"
_CHAT = (
    "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\nHere are the notes.",
    "<|im_end|>\n<|im_start|>assistant\n",
)
_SYSTEM = (
    "You are a helpful AI assistant. You answer questions about notes that people have left behind. "
    "The notes come first, one after the other, in no special order, and the question comes last. "
    "Read every note with care, since the answer is in one of them, or in several together. "
    "Give the answer in a few words, and nothing else."
)


class Behind(Enum):
    """What documents are computed behind when they are cached."""

    NOTHING = "alone"
    TEXT = "shared text"
    CHAT = "shared beginning"


@dataclass(frozen=True, slots=True)
class Task:
    """A question whose answer, which contains `answer`, is in `documents`; it begins with `opening`."""

    documents: tuple[str, ...]
    question: str
    opening: str
    answer: str


@dataclass(frozen=True, slots=True)
class BlendOutcome:
    """One way's answer.

    `kl` is the mean KL divergence of its predictions of the full prefill's answer from that one's own, in
    nats. `first_token_s` is the wall clock's, up to the first token; `process_s` the process's for the same.
    """

    blended: Blended
    kl: float
    first_token_s: float
    process_s: float


class Unmoved(ReferenceBlend):
    """The model, with keys left at the positions they were stored with."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.rope = Rope((0.0,) * len(self.rope.frequencies))


class Trial:
    """A model with one task after the other, one of which is begun at a time. The caller closes it.

    Attributes:
        tokens, segments: the task's prompt, and where the documents are in it.
        answer: the full prefill's greedy one, `num_answer` tokens or up to the model's stop.
        full_s, full_process_s: what the full prefill took, on the wall clock and of the process.

    Args:
        longest: tokens of the longest prompt with its answer.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        *,
        num_answer: int,
        longest: int,
        platform: Platform | None = None,
    ) -> None:
        self.model, self.tokenizer, self._num_answer = model, tokenizer, num_answer
        self._prompt = OnePrompt(model, longest)
        config = Config(
            use_layerwise=True,
            enable_blending=True,
            chunk_size=CHUNK_SIZE,
            max_local_cpu_size=1.0,
            blend_min_tokens=0,
        )
        self.engine: CacheEngine = open_cache_engine(
            config, model, self._prompt.cache, "trial", platform=platform
        )
        self._chat = tokenizer.encode(_CHAT[0].format(_SYSTEM))
        self._prefixes: dict[Behind, SharedPrefix] = {
            Behind.NOTHING: (),
            Behind.TEXT: tokenizer.encode,
            Behind.CHAT: self._chat,
        }

    def close(self) -> None:
        self.engine.close()

    def begin(self, task: Task) -> None:
        """Compute the task in full."""
        self.tokens, self.segments = prompt_of(task, self.tokenizer)
        started, process = time.perf_counter(), time.process_time()
        logits = self._prompt.compute(self.tokens, 0)[-1:]
        first = int(logits.argmax())
        self.full_s, self.full_process_s = time.perf_counter() - started, time.process_time() - process
        self.answer, more = self._decode(first)
        self._wanted = torch.cat([logits, more])

    def encode(self, behind: Behind = Behind.CHAT) -> None:
        """Cache the task's documents."""
        blender = self._blender(behind, True, None, None)
        for start, end in blender.missing(self.tokens, self.segments):
            slots = self._prompt.slots(blender.num_encoded(end - start))
            blender.encode(self.tokens[start:end], slots)
        if not self.engine.flush():
            raise RuntimeError("not all was stored: a tier did not take it, or it took over 30 s")

    def blend(
        self, selector: Selector, share: float, *, behind: Behind = Behind.CHAT, moved: bool = True
    ) -> BlendOutcome:
        """Blend the task's prompt, and follow the full prefill's answer."""
        blender = self._blender(behind, moved, selector, share)
        request = BlendRequest(self.tokens, self._prompt.slots(len(self.tokens)), self.segments)
        self._prompt.cache.fill(float("nan"))
        started, process = time.perf_counter(), time.process_time()
        (blended,) = blender.prefill([request])
        int(blended.logits.argmax())  # waits for the device
        wall, process = time.perf_counter() - started, time.process_time() - process
        logits = [blended.logits[None]]
        if len(self.answer) > 1:
            logits.append(self._prompt.compute(self.answer[:-1], len(self.tokens)))
        return BlendOutcome(blended, divergence(torch.cat(logits), self._wanted), wall, process)

    def say(self, outcome: BlendOutcome) -> str:
        """The greedy answer of the last `blend`, as text."""
        answer, _ = self._decode(int(outcome.blended.logits.argmax()))
        return self.tokenizer.decode(answer).strip()

    def _decode(self, first: int) -> tuple[list[int], Tensor]:
        """The greedy answer that begins with `first`, and the logits of what follows."""
        stop_tokens = self.tokenizer.stop_tokens
        return self._prompt.decode(len(self.tokens), first, self._num_answer, stop_tokens)

    def _blender(
        self, behind: Behind, moved: bool, selector: Selector | None, share: float | None
    ) -> Blender:
        model = ReferenceBlend(self.model) if moved else Unmoved(self.model)
        prefix = self._prefixes[behind]
        return Blender(self.engine, model, shared_prefix=prefix, selector=selector, share=share)


def prompt_of(task: Task, tokenizer: Tokenizer) -> tuple[list[int], list[Segment]]:
    """A task's prompt, and where the documents are in it."""
    tokens, segments = tokenizer.encode(_CHAT[0].format(_SYSTEM)), []
    for text in task.documents:
        tokens += tokenizer.encode(_BETWEEN)
        document = tokenizer.encode(text)
        segments.append(Segment(len(tokens), len(tokens) + len(document)))
        tokens += document
    tokens += tokenizer.encode(f"{_BETWEEN}{task.question}{_CHAT[1]}{task.opening}")
    return tokens, segments
