"""Blending a prompt of cached documents: time to first token against a full prefill, and what bounds it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from lwkv.benchmarks.bench.findings import Absent, Findings, table
from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.measuring.shapes import Shape
from lwkv.blend import Blender, BlendRequest, Deviation, NoTokens, QueryAttention, Selector
from lwkv.blend.forward.forward_pass import BlendPass, no_hook
from lwkv.blend.forward.paged_rows import PagedRows
from lwkv.blend.forward.rows import PromptReuse
from lwkv.blend.request import check_blend
from lwkv.config.settings import Config
from lwkv.pipeline.generators import retrieve_steps
from lwkv.pool.host_pool import PAGE_ALIGNMENT
from lwkv.reference import (
    ModelShape,
    NoCache,
    PagedCache,
    forward,
    open_cache_engine,
    random_model,
)
from lwkv.reference.batch import Part, build_batch
from lwkv.reference.blending import ReferenceBlend

NUM_DOCUMENTS = 8
HEAD_TOKENS, QUESTION_TOKENS = 16, 48
_GIB = 1 << 30


@dataclass(frozen=True)
class Way:
    """One way to blend: milliseconds and ratios, medians; see BlendTimes."""

    name: str
    share: float
    blend_ms: float
    recompute_ms: float
    over_full: float
    over_larger: float


@dataclass(frozen=True)
class BlendTimes(Findings):
    """A prompt of `reused` cached tokens and `always` others, up to the logits of its last token.

    `full_ms` is a prefill without any cache, `load_ms` the loading of all documents alone. Of each way,
    `recompute_ms` is the same pass with everything just loaded, `over_full` its time to first token over
    `full_ms`, and `over_larger` that over the larger of loading and computing. `drift` is the largest
    difference of logits between a pass that computes everything and a full prefill, over the largest logit.
    """

    reused: int
    always: int
    full_ms: float
    load_ms: float
    ways: list[Way]
    drift: float

    def lines(self, absolute: bool) -> Iterator[str]:
        times = (
            f": full prefill {self.full_ms:.1f} ms, loading alone {self.load_ms:.1f} ms" if absolute else ""
        )
        yield f"{self.reused} reused tokens and {self.always} others{times}"
        head = ["", "over full", "over the larger", *(["ms", "computing alone"] if absolute else [])]
        yield from table(head, [_row(way, absolute) for way in self.ways])
        yield f"everything computed: logits differ by {self.drift:.2g} of the largest"

    def faults(self) -> Iterator[str]:
        if not self.drift < 0.2:
            yield f"a blend that computes all differs from a full prefill by {self.drift:.2g} of a logit"


def _row(way: Way, absolute: bool) -> list[str]:
    times = [f"{way.blend_ms:.1f}", f"{way.recompute_ms:.1f}"] if absolute else []
    return [way.name, f"{way.over_full:.3f}", f"{way.over_larger:.3f}", *times]


class BlendSetup:
    """A model of the bench's shape, NUM_DOCUMENTS cached documents, and a prompt that has them in turn."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.model = random_model(
            model_shape(bench.shape, bench.prefix), device=bench.device, dtype=bench.shape.dtype
        )
        size = bench.prefix // NUM_DOCUMENTS
        draw = np.random.default_rng(0)
        vocab = self.model.shape.vocab_size
        self.head = draw.integers(0, vocab, HEAD_TOKENS)
        self.documents = [draw.integers(0, vocab, size) for _ in range(NUM_DOCUMENTS)]
        order = draw.permutation(NUM_DOCUMENTS)
        question = draw.integers(0, vocab, QUESTION_TOKENS)
        self.tokens = np.concatenate([self.head, *(self.documents[i] for i in order), question])
        starts = HEAD_TOKENS + size * np.arange(NUM_DOCUMENTS)
        self.segments = [(int(start), int(start) + size) for start in starts]
        block = bench.shape.block_size
        num_blocks = -(-len(self.tokens) // block)
        self.cache = PagedCache(
            self.model.shape,
            num_blocks=num_blocks,
            block_size=block,
            dtype=bench.shape.dtype,
            device=bench.device,
        )
        self.blocks = draw.permutation(num_blocks)
        at = np.arange(len(self.tokens))
        self.request = BlendRequest(self.tokens, self.blocks[at // block] * block + at % block, self.segments)
        self.engine = open_cache_engine(
            self._config(), self.model, self.cache, "random", platform=bench.platform
        )

    def _config(self) -> Config:
        shape, num_chunks = self.bench.shape, -(-self.bench.prefix // self.bench.shape.chunk_size)
        pages = shape.num_layers * (num_chunks + NUM_DOCUMENTS)
        size = pages * (shape.token_bytes * shape.chunk_size + PAGE_ALIGNMENT) / _GIB
        return Config(
            chunk_size=shape.chunk_size,
            use_layerwise=True,
            enable_blending=True,
            blend_min_tokens=0,
            max_local_cpu_size=size,
            extra_config={"reserve_gib": size},
        )

    def blender(self, selector: Selector, share: float) -> Blender:
        model = ReferenceBlend(self.model)
        return Blender(self.engine, model, shared_prefix=self.head.tolist(), selector=selector, share=share)

    def encode(self) -> None:
        """Cache the documents."""
        blender = self.blender(NoTokens(), 0.0)
        for document in self.documents:
            blender.encode(document, np.arange(len(self.head) + len(document)))
        self.flush()

    def flush(self) -> None:
        """Wait until everything that was begun has ended."""
        if not self.engine.flush():
            raise RuntimeError("the documents were not stored, or a load has not ended, within 30 s")

    def full(self) -> torch.Tensor:
        """Logits of a prefill without any cache."""
        part = Part(self.tokens.tolist(), 0, self.blocks.tolist())
        batch = build_batch([part], self.cache.block_size, self.model.device)
        return forward(self.model, self.cache, batch, NoCache())

    def load(self, blender: Blender) -> None:
        """Load all documents to where the prompt has them."""
        prompt = check_blend(self.request, self.engine.connector.num_slots)
        loads = [blender.segments.segment_load(prompt, segment, 0) for segment in prompt.segments]
        for _ in retrieve_steps(blender.segments.retrieval(loads), list):
            pass

    def recompute(self, blender: Blender, share: float) -> None:
        """The same pass as a blend, over what is in the slots already."""
        prompt = check_blend(self.request, self.engine.connector.num_slots)
        reused = np.zeros(len(self.tokens), bool)
        reused[self.segments[0][0] : self.segments[-1][1]] = True
        reuse = PromptReuse(prompt, 0, reused, tuple(start for start, _ in self.segments))
        rows = PagedRows(blender.segments.connector)
        BlendPass(blender.model, rows, [reuse], blender.selector, share).run(no_hook)


def measure_blend(bench: Bench) -> BlendTimes | Absent:
    """Measure the whole prefix of the run as documents, in several ways."""
    if bench.shape.use_mla or not bench.platform.features.blending:
        return Absent(f"no blending of {bench.shape.name} on {bench.platform.name}")
    with torch.inference_mode():
        setup = BlendSetup(bench)
        try:
            return _measure(setup)
        finally:
            setup.engine.close()


def _measure(setup: BlendSetup) -> BlendTimes:
    setup.encode()
    reuse = setup.blender(NoTokens(), 0.0)
    full = setup.bench.median_ms(setup.full)
    load = setup.bench.median_ms(lambda: setup.load(reuse), setup.flush)
    ways = [
        _way(setup, name, selector, share, full, load)
        for name, selector, share in (
            ("plain reuse", NoTokens(), 0.0),
            ("deviation, 15 %", Deviation(), 0.15),
            ("query, 15 %", QueryAttention.of(setup.model.shape.num_layers), 0.15),
            ("deviation, 30 %", Deviation(), 0.3),
        )
    ]
    return BlendTimes(setup.bench.prefix, HEAD_TOKENS + QUESTION_TOKENS, full, load, ways, _drift(setup))


def _way(setup: BlendSetup, name: str, selector: Selector, share: float, full: float, load: float) -> Way:
    blender = setup.blender(selector, share)

    def blend() -> None:
        (found,) = blender.prefill([setup.request])
        if found.num_reused != setup.bench.prefix:
            raise RuntimeError(f"only {found.num_reused} of {setup.bench.prefix} tokens were reused")

    def prepare() -> None:
        # What is chosen depends on what was loaded: loaded before each, both choose the same tokens.
        setup.load(blender)
        setup.flush()  # nor is the host busy with the end of another request

    times = setup.bench.alternate_ms([blend, lambda: setup.recompute(blender, share)], prepare)
    blended, recomputed = map(statistics.median, times)
    return Way(name, share, blended, recomputed, blended / full, blended / max(load, recomputed))


def _drift(setup: BlendSetup) -> float:
    (found,) = setup.blender(Deviation(), 1.0).prefill([setup.request])
    wanted = setup.full()[0]
    return float((found.logits - wanted).abs().max() / wanted.abs().max())


def model_shape(shape: Shape, num_tokens: int) -> ModelShape:
    """The model whose KV cache has that shape."""
    return ModelShape(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        intermediate_size=shape.intermediate,
        vocab_size=1 << 15,
        max_positions=2 * num_tokens,
        rope_base=500_000.0,
    )
