"""A worker's half of blending: carries orders out before vLLM's forward pass, or beside several of them."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from lwkv.blend.forward.paged_rows import PagedRows
from lwkv.blend.forward.rows import PromptReuse
from lwkv.blend.request import CheckedBlend
from lwkv.blend.segment_cache import SegmentCache, SegmentLoad, lay_out
from lwkv.blend.selector import ByAttention, Deviation, Selector
from lwkv.errors import DEVICE_FAILURES
from lwkv.integrations.vllm.blending.model.calls import Layers
from lwkv.integrations.vllm.blending.orders import BlendOrder, EncodeOrder
from lwkv.integrations.vllm.blending.worker.blend_pass import BlendPass, Computed, Parts
from lwkv.integrations.vllm.blending.worker.question import Question
from lwkv.integrations.vllm.blending.worker.ranks import Ranks
from lwkv.integrations.vllm.blending.worker.share import ControlledShare, TimedBlend
from lwkv.keys import ChunkKey
from lwkv.pipeline.retrieval import BatchRetrieval
from lwkv.platforms.protocol import Int64s
from lwkv.telemetry.counters import Counters
from lwkv.telemetry.log_throttle import LogThrottle
from lwkv.transfer import NO_SLOT

log = logging.getLogger(__name__)

PART = 0.25
"""Of a blend, what a step does beside other requests: less than a prefill of as many rows would add to it."""


@dataclass(slots=True, eq=False)
class Blend:
    """An order that is being carried out.

    Attributes:
        parts: gives the part of the whole that each layer was, None where the next one can wait for a later
            step, and at last whether all has arrived.
    """

    order: BlendOrder
    parts: Parts[bool]


class BlendWorker:
    """Encodes segments and blends prompts on one engine's caches. For the thread that runs the forward pass.

    A blend that the step's own requests are not to wait for is done in parts, one in each step: what has been
    computed stays in the device's memory between these. Its request has its blocks until the end is reported.

    Args:
        segments: of the engine.
        layers: vLLM's model.
        selector: chooses the tokens to compute again.
        share: of the reused tokens, the part to compute again, at least.
        controlled: chooses more of them where that delays nobody; None for `share` always.
        block_size: tokens of a block.
        ranks: that compute the same prompt, each with some of its heads.

    Attributes:
        is_running: whether vLLM's layers are being called from here: hooks around them have nothing to do.
    """

    def __init__(
        self,
        segments: SegmentCache,
        layers: Layers,
        selector: Selector,
        share: float,
        block_size: int,
        counters: Counters,
        ranks: Ranks | None = None,
        controlled: ControlledShare | None = None,
    ) -> None:
        self._segments, self._layers = segments, layers
        self.selector, self.share, self.controlled = selector, share, controlled
        self._block_size = block_size
        self._counters = counters
        self._ranks = ranks or Ranks()
        self._rows = PagedRows(segments.connector)
        self._throttle = LogThrottle(log)
        self.is_running = False
        self._blends: Sequence[BlendOrder] = ()
        self._encodes: Sequence[EncodeOrder] = ()
        self._is_alone = False
        self._ordered: list[BlendOrder] = []
        self._unfinished: list[Blend] = []
        self._ended: set[str] = set()
        self._invalid: set[int] = set()
        self._lost_blocks: set[int] = set()
        self._stored: list[ChunkKey] = []
        self._lost: list[ChunkKey] = []

    def begin_step(
        self, blends: Sequence[BlendOrder], encodes: Sequence[EncodeOrder], is_alone: bool = False
    ) -> None:
        """Take the orders of a step, and forget those of the one before.

        Args:
            is_alone: whether vLLM computes nothing in the step, so that blends delay nobody.
        """
        self._blends = [order for order in blends if order.waiting is None]
        self._ordered += [order for order in blends if order.waiting is not None]
        self._encodes, self._is_alone = encodes, is_alone
        self._invalid = set()

    def invalid_blocks(self) -> set[int]:
        """Blocks of the step's prompts that could not be blended, or were not; vLLM computes them again."""
        blends, self._blends = self._blends, ()
        for order in blends:
            self._fail(order)
        return self._invalid

    def lost_blocks(self) -> set[int]:
        """Those of waiting prompts since the last call: nobody has computed anything on them."""
        lost, self._lost_blocks = self._lost_blocks, set()
        return lost

    def ended(self, requests: Collection[str]) -> set[str]:
        """Waiting requests whose blends have ended since the last call: nothing writes to their blocks.

        Args:
            requests: that have ended; their blends are given up, and count as ended.
        """
        for blend in [blend for blend in self._unfinished if blend.order.waiting in requests]:
            blend.parts.close()
            self._unfinished.remove(blend)
            self._note_end(blend.order)
        for order in [order for order in self._ordered if order.waiting in requests]:
            self._ordered.remove(order)
            self._note_end(order)
        ended, self._ended = self._ended, set()
        return ended

    def close(self) -> None:
        """Give up what is not finished."""
        for blend in self._unfinished:
            blend.parts.close()
        self._unfinished.clear()

    def take_keys(self) -> tuple[list[ChunkKey], list[ChunkKey]]:
        """Chunks that were stored, and chunks that could not be loaded, since the last call."""
        stored, self._stored = self._stored, []
        lost, self._lost = self._lost, []
        return stored, lost

    def encode(self) -> None:
        """Compute the step's segments alone and store them, once.

        Their blocks can be used again behind the work queued here.
        """
        encodes, self._encodes = self._encodes, ()
        for order in encodes:
            with self._calling():
                try:
                    self._encode(order)
                except DEVICE_FAILURES:
                    if self._ranks.are_several:
                        raise  # others are within a layer, and wait: as in vLLM's own pass
                    self._counters.add("blend_failures")
                    log.exception("a segment cannot be encoded: it is computed with each prompt")

    def blend(self, on_their_way: Collection[ChunkKey]) -> None:
        """Fill the blocks of the step's prompts, once, or report them as invalid; and go on with others.

        Args:
            on_their_way: chunks whose bytes may not have arrived in host memory yet.
        """
        blends, self._blends = self._blends, ()
        for order in blends:
            self._go_on(self._begin(order, on_their_way), math.inf)
        ordered, self._ordered = self._ordered, []
        self._unfinished += [self._begin(order, on_their_way) for order in ordered]
        most = math.inf if self._is_alone else PART
        while self._unfinished and self._go_on(self._unfinished[0], most):
            self._note_end(self._unfinished.pop(0).order)

    def _begin(self, order: BlendOrder, on_their_way: Collection[ChunkKey]) -> Blend:
        loads = self._loads(order)
        if any(not set(on_their_way).isdisjoint(load.keys) for load in loads):
            parts = self._segments.engine.parts()
            parts.completions.wait_idle(parts.config.load_timeout_s)
        return Blend(order, self._parts(order, loads))

    def _go_on(self, blend: Blend, most: float) -> bool:
        """Do a part of a blend, `most` and up to a layer more; whether it has ended.

        The part ends before the device is waited for, unless all is to be done.
        """
        done, is_part = 0.0, most < math.inf
        with self._calling():
            try:
                while done < most:
                    part = next(blend.parts)
                    if part is None and is_part:
                        return False
                    done += part or 0.0
                return False
            except StopIteration as end:
                arrived = end.value
            except DEVICE_FAILURES:
                if self._ranks.are_several:
                    raise  # others are within a layer, and wait: as in vLLM's own pass
                log.exception("a prompt cannot be blended")
                arrived = False
        if not arrived:
            self._fail(blend.order)
        return True

    def _note_end(self, order: BlendOrder) -> None:
        assert order.waiting is not None
        self._ended.add(order.waiting)

    def _encode(self, order: EncodeOrder) -> None:
        prefix = np.array(self._segments.shared_prefix, np.int64)
        ids = np.concatenate([prefix, order.tokens])
        with closing(
            self._segments.storing(order.tokens, order.slots[len(prefix) :], order.salts)
        ) as storing:
            calls = self._layers.calls(np.arange(len(ids)), order.slots)
            with torch.inference_mode():
                states = self._layers.embed(ids)
                for layer in range(self._layers.num_layers):
                    states = self._layers.run(layer, calls, states)
                    storing.advance(layer)
            storing.commit()
        self._stored += self._segments.keys(order.tokens, order.salts)
        self._counters.add("blend_segments_encoded")
        self._counters.add("blend_tokens_encoded", len(order.tokens))

    def _parts(self, order: BlendOrder, loads: Sequence[SegmentLoad]) -> Parts[bool]:
        """Whether all that was promised has arrived: else what was computed may rest on garbage."""
        prompt = _computed(order)
        # No step waits for a tier below because of a segment, which was brought from there if it was in time.
        # Nor because of the exact prefix of a prompt that waits, which was promised out of host memory.
        first = 0 if order.waiting is not None else len(loads) - len(order.segments)
        in_host = range(first, len(loads))
        with closing(self._segments.retrieval(loads, in_host=in_host)) as retrieval:
            # A rank that lacks a chunk computes its tokens, and so do the others.
            reuse = lay_out(prompt, loads, self._ranks.least(retrieval.hold()))
            chosen = self._choose_share(order, reuse)
            computation = self._pass(order, reuse, self.share if chosen is None else chosen.share)
            if order.waiting is not None:
                yield None  # the step in which vLLM has planned the prompt has taken the host long enough
            promised = retrieval.open()
            if order.waiting is not None:
                yield None  # the link brings the first layers while others' step computes
            computed = yield from self._compute(computation, chosen, retrieval)
            masks = retrieval.finish()
        lost = [int(mask.sum()) < count for mask, count in zip(masks, promised, strict=True)]
        for load, mask, is_lost in zip(loads, masks, lost, strict=True):
            if is_lost:
                self._note_lost(load, mask.numpy())
        if any(lost):
            return False
        # What failed has waited as long as can be, and then did not load all.
        if self.controlled is not None and chosen is not None:
            self.controlled.note(chosen, computed.row_layers)
        self._count(order, reuse, computed)
        return True

    def _choose_share(self, order: BlendOrder, reuse: PromptReuse) -> TimedBlend | None:
        """None for the configured one: what is computed beside others delays them, also while loads come."""
        if self.controlled is None or not len(reuse.candidates) or order.waiting is not None:
            return None
        return self.controlled.choose(reuse, self.share)

    def _compute(
        self, computation: BlendPass, chosen: TimedBlend | None, retrieval: BatchRetrieval
    ) -> Parts[Computed]:
        def wait(layer: int) -> None:
            retrieval.advance(layer + 1)  # a layer is waited for when the one behind it is queued

        if self.controlled is None or chosen is None:
            # What has come on one rank need not have come on others, which are to stop alike.
            coming = (lambda _: False) if self._ranks.are_several else retrieval.is_coming
            return (yield from computation.parts(wait, coming))
        computed = yield from computation.parts(self.controlled.timed(chosen, wait))
        chosen.pace.end()
        return computed

    def _pass(self, order: BlendOrder, reuse: PromptReuse, share: float) -> BlendPass:
        selector, question = self.selector, None
        if isinstance(selector, ByAttention) and share:
            question = question_of(order)
            if question is None:
                # The step has not all of it, as where a long prompt is computed in parts.
                self._counters.add("blend_questions_missing")
                selector = Deviation()
        given = self._layers, self._rows, reuse, selector, share, question
        return BlendPass(*given, total=self._ranks.total)

    def _loads(self, order: BlendOrder) -> list[SegmentLoad]:
        whole = _prompt(order, len(order.tokens))
        exact = (
            [self._segments.exact_load(whole, order.num_exact)] if order.num_exact > order.num_local else []
        )
        return exact + [
            self._segments.segment_load(whole, segment, order.num_exact) for segment in order.segments
        ]

    def _note_lost(self, load: SegmentLoad, arrived: object) -> None:
        slots = load.request.slots
        missing = np.flatnonzero((slots != NO_SLOT) & ~np.asarray(arrived))
        chunks = np.unique(missing // load.request.chunk_size).tolist()
        self._lost += [load.keys[chunk] for chunk in chunks if chunk < len(load.keys)]

    def _fail(self, order: BlendOrder) -> None:
        slots = _computed(order).slots[order.num_local :]
        invalid = self._invalid if order.waiting is None else self._lost_blocks
        invalid.update((slots // self._block_size).tolist())
        self._counters.add("blend_tokens_lost", len(slots))
        self._counters.add("blend_failures")
        self._throttle.warn(
            "%d tokens of a prompt could not be blended; on_load_failure says what follows", len(slots)
        )

    def _count(self, order: BlendOrder, reuse: PromptReuse, computed: Computed) -> None:
        self._counters.add("blend_requests")
        self._counters.add("blend_tokens_known", reuse.known)
        self._counters.add("blend_tokens_reused", len(reuse.candidates))
        self._counters.add("blend_tokens_chosen", computed.num_chosen)
        self._counters.add("blend_tokens_computed", len(reuse.always))

    @contextmanager
    def _calling(self) -> Iterator[None]:
        self.is_running = True
        try:
            with self._layers.eagerly():
                yield
        finally:
            self.is_running = False


def question_of(order: BlendOrder) -> Question | None:
    """The question of a prompt, which is what stands behind its last segment; None where it is not there."""
    num_tokens = order.end + len(order.question_slots)
    first = order.segments[-1].end
    if first >= num_tokens:
        return None
    return Question(order.tokens[:num_tokens], _with_question(order), first)


def _computed(order: BlendOrder) -> CheckedBlend:
    """The tokens that are in place when a blend has ended."""
    if order.waiting is None:
        return _prompt(order, order.end)
    slots = _with_question(order)
    return CheckedBlend(order.tokens[: len(slots)], slots, order.segments, order.num_local, order.salts)


def _with_question(order: BlendOrder) -> Int64s:
    return np.concatenate([order.slots, order.question_slots])


def _prompt(order: BlendOrder, num_tokens: int) -> CheckedBlend:
    """The first `num_tokens` of a prompt; those behind `order.end` have no slot."""
    slots = np.full(num_tokens, NO_SLOT, np.int64)
    slots[: order.end] = order.slots[:num_tokens]
    return CheckedBlend(order.tokens[:num_tokens], slots, order.segments, order.num_local, order.salts)
