"""The demo's model with a paged cache, a serving engine and a cache engine around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lwkv.cli.demo.loads import SpoiledLoads
from lwkv.cli.demo.model_file import NamedModel
from lwkv.cli.demo.progress import Tick, ignore
from lwkv.config.settings import Config
from lwkv.platforms import Platform
from lwkv.reference import (
    Answer,
    KVSteps,
    Limits,
    Model,
    NoCache,
    PagedCache,
    Prompt,
    ReferenceEngine,
    generate,
    open_cache_engine,
)
from lwkv.steps import LayerSteps
from lwkv.telemetry.timeline import Recording, Span, Timeline

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Run:
    """One answered prompt.

    `logits` are float32 (answer tokens, vocab_size), on the host. `spans` begin with the prompt's submission;
    compute spans end with the first token's forward pass. `num_retrieved` tokens were retrieved and
    `num_stored` chunks stored as the cache engine itself counts them.
    """

    answer: Answer
    logits: Tensor
    spans: list[Span]
    num_retrieved: int
    num_stored: int


class Stage:
    """Runs prompts one at a time; each finds NaN all over the paged cache, so that nothing old can be used.

    Attributes:
        no_cache, by_layers, in_bulk, spoiled: the KV caches to choose from in `run`.

    Args:
        step_tokens: most prompt tokens of a forward pass. Where loads end at this number too, all sums of a
            prompt are made in the same order whether its KV is loaded or computed.
        num_tokens: the longest prompt with its answer.
    """

    def __init__(
        self, named: NamedModel, platform: Platform, config: Config, step_tokens: int, num_tokens: int
    ) -> None:
        self.num_layers = named.model.shape.num_layers
        self._platform, self._device = platform, named.model.device
        self._model = _ListeningModel(named.model)
        self._cache = PagedCache(
            named.model.shape,
            num_blocks=-(-num_tokens // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            dtype=named.model.dtype,
            device=self._device,
        )
        self._limits = Limits(step_tokens=step_tokens, chunk_size=config.chunk_size)
        self._timeline = Timeline(platform, self._device)
        self._recording: Recording | None = None
        self._tick: Tick = ignore
        self.engine = open_cache_engine(
            config, named.model, self._cache, named.name, platform=platform, timeline=self._timeline
        )
        self.no_cache = NoCache()
        self.by_layers = LayerSteps(self.engine)
        self.in_bulk = LayerSteps(self.engine, layerwise=False)
        self.spoiled = SpoiledLoads(self.engine, self._cache)

    def run(self, prompt: Prompt, steps: KVSteps, tick: Tick = ignore) -> Run:
        """Answer `prompt` with one of the KV caches; `tick` gets the tokens computed in each layer."""
        lookup = None if steps is self.no_cache else self.engine.lookup
        engine = ReferenceEngine(
            self._model, self._cache, steps=steps, lookup=lookup, limits=self._limits, mark=self._mark
        )
        self._clear(tick)
        before = self._counts()
        (answer,) = generate(engine, [prompt])
        if not self.engine.flush():
            raise RuntimeError("not all was stored: a tier did not take it, or it took over 30 s")
        return Run(
            answer,
            torch.cat(self._model.heard[-len(answer.tokens) :]).cpu(),
            self._spans(answer.first_token_s),
            *(after - earlier for after, earlier in zip(self._counts(), before, strict=True)),
        )

    def close(self) -> None:
        """End what an interrupt left half done, and give everything back."""
        for steps in (self.by_layers, self.in_bulk, self.spoiled):
            steps.begin((), ())
        self.engine.close()

    def _clear(self, tick: Tick) -> None:
        self._tick = tick
        self._model.heard.clear()
        self._cache.fill(float("nan"))
        self._platform.synchronize_device(self._device)
        self._timeline.restart()

    def _mark(self, phase: str, layer: int) -> None:
        if phase in ("start", "attend"):
            stream = self._platform.current_stream(self._device)
            self._recording = self._timeline.span("compute", layer, stream)
        elif self._recording is not None:
            self._recording.end()
        if phase == "end":
            self._tick(self._model.num_tokens)

    def _spans(self, first_token_s: float) -> list[Span]:
        spans = self._timeline.spans()
        return [span for span in spans if span.lane != "compute" or span.start < first_token_s]

    def _counts(self) -> tuple[int, int]:
        stats = self.engine.stats()
        return stats.get("tokens_retrieved", 0), stats["chunks"]


@contextmanager
def open_stage(
    named: NamedModel, platform: Platform, config: Config, step_tokens: int, num_tokens: int
) -> Iterator[Stage]:
    """Make a stage and close it, whatever happens."""
    stage = Stage(named, platform, config, step_tokens, num_tokens)
    try:
        yield stage
    finally:
        stage.close()


class _ListeningModel(Model):
    """The same model; `heard` has the logits of every step, `num_tokens` the size of the last one."""

    def __init__(self, model: Model) -> None:
        super().__init__(model.shape, model.weights)
        self.heard: list[Tensor] = []
        self.num_tokens = 0

    def embed(self, tokens: Tensor) -> Tensor:
        self.num_tokens = len(tokens)
        return super().embed(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        self.heard.append(super().logits(hidden))
        return self.heard[-1]
