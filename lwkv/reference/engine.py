"""A small serving engine: batches requests, drives the model, and calls the KV cache as vLLM does."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lwkv.blend import Blender, BlendRequest
from lwkv.blend.request import check_segments
from lwkv.errors import ConfigError, RequestError
from lwkv.reference.batch import Part, build_batch
from lwkv.reference.blocks import BlockAllocator
from lwkv.reference.cache import PagedCache
from lwkv.reference.forward import LayerMark, forward, no_mark
from lwkv.reference.hooks import KVSteps, NoCache, StepOutcome
from lwkv.reference.model.llama import Model
from lwkv.reference.request import Answer, Prompt, RunningRequest, block_slots
from lwkv.reference.scheduler import Limits, Lookup, Scheduler, StepShare


class ReferenceEngine:
    """Serves prompts greedily from a paged cache. For one thread; nothing runs between calls.

    Args:
        cache: of the model's shape, dtype and device.
        steps: the KV cache beside the engine.
        lookup: asked once a request for the cached prefix; None means that nothing is ever loaded.
        mark: called for every layer's phases, but not of those of prompts that are blended.
        blender: on a cache engine of the same cache; None where the segments of prompts mean nothing.
            Segments that were not cached are computed alone and stored once their prompt is answered.

    Raises:
        ConfigError: the cache's dtype or device is not the model's.
    """

    def __init__(
        self,
        model: Model,
        cache: PagedCache,
        *,
        steps: KVSteps | None = None,
        lookup: Lookup | None = None,
        limits: Limits | None = None,
        mark: LayerMark = no_mark,
        blender: Blender | None = None,
    ) -> None:
        tensor = next(iter(cache.tensors.values()))
        if (tensor.dtype, tensor.device) != (model.dtype, model.device):
            raise ConfigError(
                f"the cache is {tensor.dtype} on {tensor.device}; "
                f"the model needs {model.dtype} on {model.device}"
            )
        self.model = model
        self.cache = cache
        self.allocator = BlockAllocator(cache.num_blocks)
        self._steps: KVSteps = NoCache() if steps is None else steps
        self._scheduler = Scheduler(
            self.allocator, cache.block_size, limits or Limits(), lookup, blender is not None
        )
        self._blender = blender
        self._mark = mark
        self._num_submitted = 0

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def submit(self, prompt: Prompt) -> int:
        """Queue a request; returns its index, counted from 0. Raises RequestError if it could never run."""
        if self._blender is not None:
            check_segments(prompt.segments, len(prompt.tokens))
        length, longest = len(prompt.tokens) + prompt.max_new_tokens, self.model.shape.max_positions
        if length > longest:
            raise RequestError(
                f"prompt and answer take {length} tokens; the model's longest request is {longest}"
            )
        self._scheduler.add(RunningRequest(self._num_submitted, prompt, list(prompt.tokens)))
        self._num_submitted += 1
        return self._num_submitted - 1

    def step(self) -> dict[int, Answer]:
        """Run one forward pass if there is work; returns the answers that it finished, by request index."""
        blends = self._scheduler.start_blends()
        if blends:
            return self._blend(blends)
        works = self._scheduler.plan()
        if not works:
            return {}
        logits, outcome = self._run(works)
        present = _present(works, outcome)
        # The one place where the host waits for the device.
        sampled = logits.argmax(-1).tolist()
        finished = {}
        for work, num_present, token in zip(works, present, sampled, strict=True):
            if self._advance(work, num_present, outcome.stored, token):
                finished[work.state.index] = work.state.answer()
        return finished

    def _blend(self, states: Sequence[RunningRequest]) -> dict[int, Answer]:
        """Compute whole prompts over segments from anywhere; their decoding goes on as any other's."""
        assert self._blender is not None
        requests = [
            BlendRequest(
                state.tokens,
                state.slots(len(state.tokens), self.cache.block_size),
                state.prompt.segments,
                state.prompt.num_local,
                state.prompt.salts,
            )
            for state in states
        ]
        finished = {}
        for state, blended in zip(states, self._blender.prefill(requests), strict=True):
            state.num_computed = state.num_prompt
            state.num_loaded = blended.num_known - state.prompt.num_local + blended.num_reused
            state.num_prefilled = blended.num_chosen + blended.num_computed
            state.num_steps += 1
            if self._sample(state, int(blended.logits.argmax())):
                finished[state.index] = state.answer()
        return finished

    def _run(self, works: Sequence[StepShare]) -> tuple[Tensor, StepOutcome]:
        parts = [
            Part(work.state.tokens[work.start : work.end], work.start, work.state.blocks) for work in works
        ]
        self._steps.begin(
            [work.load for work in works if work.load is not None],
            [work.store for work in works if work.store is not None],
        )
        self._steps.start_load_kv()
        batch = build_batch(parts, self.cache.block_size, self.model.device)
        logits = forward(self.model, self.cache, batch, self._steps, self._mark)
        return logits, self._steps.wait_for_save()

    def _advance(self, work: StepShare, num_present: int, stored: bool, token: int) -> bool:
        """Take over a step's outcome for one request; True if it is finished."""
        state = work.state
        # After a failed load the step's KV and logits are wrong: the token is dropped, the rest redone.
        if not self._scheduler.complete(work, num_present, stored) or work.end < len(state.tokens):
            return False
        return self._sample(state, token)

    def _sample(self, state: RunningRequest, token: int) -> bool:
        """Take a sampled token; True if the request is finished."""
        state.add(token)
        if not state.is_finished:
            return False
        self._scheduler.finish(state)
        if state.is_blended:
            self._encode(state.prompt)
        return True

    def _encode(self, prompt: Prompt) -> None:
        """Compute and store the segments of a prompt that are not cached, where blocks are free for them."""
        assert self._blender is not None
        for start, end in self._blender.missing(prompt.tokens, prompt.segments, prompt.salts):
            num_tokens = self._blender.num_encoded(end - start)
            num_blocks = -(-num_tokens // self.cache.block_size)
            if num_blocks <= self.allocator.num_free:
                blocks = self.allocator.take(num_blocks)
                self._blender.encode(
                    prompt.tokens[start:end],
                    block_slots(blocks, num_tokens, self.cache.block_size),
                    prompt.salts,
                )
                self.allocator.free(blocks)


def _present(works: Sequence[StepShare], outcome: StepOutcome) -> list[int]:
    """Count for each request the tokens before the first one that failed to load."""
    loading = [work for work in works if work.load is not None]
    present = {work.state.index: work.start for work in works}
    for work, mask in zip(loading, outcome.loaded, strict=True):
        present[work.state.index] = _first_missing(work, mask)
    return list(present.values())


def _first_missing(work: StepShare, loaded: Tensor) -> int:
    assert work.load is not None
    wanted = work.load.mask & (work.load.slot_mapping >= 0)
    missing = (wanted & ~loaded).nonzero()
    return int(missing[0]) if len(missing) else work.start


def generate(engine: ReferenceEngine, prompts: Sequence[Prompt]) -> list[Answer]:
    """Serve prompts together until all are answered; returns their answers in order."""
    indices = [engine.submit(prompt) for prompt in prompts]
    answers: dict[int, Answer] = {}
    while not all(index in answers for index in indices):
        answers.update(engine.step())
    return [answers[index] for index in indices]
