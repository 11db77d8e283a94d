"""CacheBlend: prompts whose documents come from the cache in any order, and a few tokens of them computed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lwkv.blend.forward.forward_pass import BlendPass, no_hook
from lwkv.blend.forward.head_start import HeadStart, head_start
from lwkv.blend.forward.paged_rows import PagedRows
from lwkv.blend.forward.rows import PromptReuse
from lwkv.blend.model import BlendModel
from lwkv.blend.request import BlendRequest, CheckedBlend, Segment, check_blend, check_segments
from lwkv.blend.segment_cache import SegmentCache, SegmentLoad, lay_out
from lwkv.blend.selector import ByChange, NoTokens, Selector, configured_selector, require_share
from lwkv.blend.share.batch_shares import Shares, timed
from lwkv.blend.share.controller import BatchWork, Decision, LoadingController, Reason
from lwkv.blend.shared_prefix import SharedPrefix
from lwkv.engine import CacheEngine
from lwkv.errors import ConfigError, RequestError
from lwkv.keys import TokenIds, as_token_ids
from lwkv.pipeline.retrieval import BatchRetrieval

# So often a batch is begun with loads, each time without what failed before; then all of it is computed.
MOST_TRIES = 3


@dataclass(frozen=True, slots=True)
class Blended:
    """How one prompt was computed: numbers of its tokens.

    Attributes:
        logits: of its last token, float32 (vocab,), on the device.
        num_known: leading tokens that were in place or loaded as an ordinary prefill had stored them.
        num_reused: tokens of segments that were loaded, of which `num_chosen` were computed again.
        num_computed: tokens that were in no cache.
        share: the part of the reused tokens that was to be computed again; 0 where none was reused.
    """

    logits: Tensor
    num_known: int
    num_reused: int
    num_chosen: int
    num_computed: int
    share: float


class Blender:
    """Blends prompts on one cache engine. For the engine's thread; the engine is the caller's to close.

    The blocks of a blended prompt are right for going on with decoding, but what is in them is no exact
    prefill's KV: never store or share them as a prefix.

    Args:
        engine: made with `enable_blending`, on the paged cache of `model`.
        shared_prefix: what segments are computed behind and is then dropped, for it takes the attention that
            a text's first token otherwise draws to itself: the tokenizer's encode, for a text that lwkv has
            for it, or token ids, as of the beginning of all chats; () for none, which is nearly always worse.
        selector: which reused tokens are computed again; by default as `blend_selector`, `blend_check_layers`
            and `blend_recompute_ratios` say.
        share: of the reused tokens, the part to compute again, always. By default a LoadingController decides
            for each batch, and the selector's own share, or the configured ratio, is the least.

    Raises:
        ConfigError: no shared prefix; an engine without the buffer connector; a cache of another model, or
            quantized; a check layer that the model does not have; a share outside 0 to 1.
        LayoutError: caches whose keys cannot be turned.
    """

    def __init__(
        self,
        engine: CacheEngine,
        model: BlendModel,
        *,
        shared_prefix: SharedPrefix | None = None,
        selector: Selector | None = None,
        share: float | None = None,
    ) -> None:
        if share is not None:
            require_share("share", share)
        self.segments = SegmentCache(engine, shared_prefix)
        self.model = model
        plan = engine.config.blend_plan
        name = engine.config.blend_selector
        self.selector = selector or configured_selector(name, plan, model.num_layers)
        _require_layers(self.selector, model.num_layers)
        self._min_tokens = engine.config.blend_min_tokens
        self._connector = self.segments.connector
        self._connector.set_rope(model.rope)
        self._rows = PagedRows(self._connector)
        self._counters = engine.parts().counters
        by_change = self.selector if isinstance(self.selector, ByChange) else None
        self._full_layers = by_change.layers[0] if by_change else 0
        usual = by_change.shares[-1] if by_change else plan[-1][1]
        self._least_share = usual if share is None else share
        controller = LoadingController(usual) if share is None else None
        self._shares = Shares(
            self._least_share,
            controller,
            self._connector.platform,
            self._connector.device,
            self._counters,
        )
        self._compile()

    def missing(
        self, tokens: TokenIds, segments: Sequence[tuple[int, int]], salts: Sequence[str] = ()
    ) -> list[Segment]:
        """Those of a prompt's segments that are not wholly cached. Raises RequestError as `prefill`.

        What was just encoded is found once it is stored: `engine.flush` waits for that.
        """
        ids = as_token_ids(tokens)
        return [
            part
            for part in check_segments(segments, len(ids))
            if self.segments.num_cached(ids[part.start : part.end], salts) < part.end - part.start
        ]

    def num_encoded(self, num_tokens: int) -> int:
        """How many slots `encode` needs for a segment of so many tokens."""
        return len(self.segments.shared_prefix) + num_tokens

    def encode(self, tokens: TokenIds, slots: Any, salts: Sequence[str] = ()) -> None:
        """Compute one segment alone, behind the shared prefix, and store it under its own content.

        Args:
            slots: int64 (num_encoded(len(tokens)),), free ones; free again behind the work queued here.

        Raises:
            RequestError: as `check_blend`; another number of slots.
        """
        prefix = np.array(self.segments.shared_prefix, np.int64)
        ids = as_token_ids(tokens)
        if np.shape(slots) != (self.num_encoded(len(ids)),):
            raise RequestError(
                f"slots have the shape {np.shape(slots)}; give {self.num_encoded(len(ids))} (num_encoded): "
                f"one for each of {len(ids)} tokens and of the {len(prefix)} of the shared prefix"
            )
        prompt = self._checked(BlendRequest(np.concatenate([prefix, ids]), slots))
        reuse = PromptReuse(prompt, 0, np.zeros(len(prompt), bool))
        with closing(self.segments.storing(ids, prompt.slots[len(prefix) :], salts)) as storing:
            computation = BlendPass(self.model, self._rows, [reuse], NoTokens(), 0.0)
            computation.run(no_hook, storing.advance)
            storing.commit()

    def prefill(self, requests: Sequence[BlendRequest]) -> list[Blended]:
        """Compute prompts together, each up to the logits of its last token.

        All KV is in the requests' slots behind the work queued here. What cannot be loaded is computed: where
        a layer of a chunk does not arrive in time, the prompts are begun again without what failed. So is a
        segment at position 0 that was computed behind a shared prefix, as far as no cached prefix covers it.

        Raises:
            RequestError: as `check_blend`, or a slot that one prompt writes and another has. ClosedError.
        """
        prompts = [self._checked(request) for request in requests]
        _refuse_shared_slots(prompts)
        if not prompts:
            return []
        prefixes = [self.segments.prefix_load(prompt) for prompt in prompts]
        head = self._head_start(prompts, prefixes)
        loads = [self._loads(*part) for part in zip(prompts, prefixes, strict=True)]
        for _ in range(MOST_TRIES):
            blended, failed = self._try(prompts, loads, head)
            if not failed:
                break
            self._counters.add("blend_retries")
            loads = [[load for load in part if load not in failed] for part in loads]
            head = None  # the pass has used it, and has used the blocks
        else:
            blended, _ = self._try(prompts, [[] for _ in prompts], None)
        self._count(blended)
        return blended

    def stats(self) -> dict[str, float]:
        """What the next share depends on: speeds in seconds a token and layer, 0 where nothing was timed yet.

        Totals are in the engine's own `stats`: `blend_tokens_*`, `blend_decisions_*`, `blend_retries`.
        """
        controller = self._shares.controller
        return {
            "share": self._shares.last.share,
            "compute_s": (controller and controller.compute_s) or 0.0,
            "load_s": (controller and controller.load_s) or 0.0,
        }

    def _head_start(
        self, prompts: Sequence[CheckedBlend], prefixes: Sequence[SegmentLoad | None]
    ) -> HeadStart | None:
        """Compute the first layer ahead, where all rows of it are computed whatever is found of segments."""
        known = any(prompt.num_local for prompt in prompts) or any(prefixes)
        exact = any(self.segments.is_exact(segment) for prompt in prompts for segment in prompt.segments)
        if known or exact or not self._full_layers or not self._least_share:
            return None
        platform = self._connector.platform
        behind = platform.new_event()
        platform.record(behind, platform.current_stream(self._connector.device))
        return head_start(self.model, self._rows, prompts, behind)

    def _try(
        self,
        prompts: Sequence[CheckedBlend],
        loads: Sequence[Sequence[SegmentLoad]],
        head: HeadStart | None,
    ) -> tuple[list[Blended], list[SegmentLoad]]:
        """One pass; what it gives may only be used where none of `loads` failed."""
        asked = [load for part in loads for load in part]
        with closing(self.segments.retrieval(asked, head and head.behind)) as retrieval:
            counts = iter(retrieval.hold())
            reuses = [
                lay_out(prompt, part, [next(counts) for _ in part])
                for prompt, part in zip(prompts, loads, strict=True)
            ]
            work = self._work(reuses)
            decision = self._shares.choose(work) if work.reused else Decision(0.0, Reason.FIXED)
            # What is exact is loaded in any case, also behind something that is not there any more.
            if decision.reason is not Reason.PREFILL or all(load.is_exact for load in asked):
                computation = BlendPass(self.model, self._rows, reuses, self.selector, decision.share, head)
                blended, arrived = self._pass(computation, reuses, work, decision, retrieval)
                return blended, [load for load, ok in zip(asked, arrived, strict=True) if not ok]
        return self._try(prompts, [[load for load in part if load.is_exact] for part in loads], head)

    def _pass(
        self,
        computation: BlendPass,
        reuses: Sequence[PromptReuse],
        work: BatchWork,
        decision: Decision,
        retrieval: BatchRetrieval,
    ) -> tuple[list[Blended], list[bool]]:
        """Compute while what is held is loaded; whether each load has brought all it promised."""
        pace, promised = self._shares.new_pace(), retrieval.open()
        # A layer is waited for when the one behind it is queued.
        computed = computation.run(timed(lambda layer: retrieval.advance(layer + 1), pace))
        pace.end()
        masks = zip(retrieval.finish(), promised, strict=True)
        arrived = [int(mask.sum()) == count for mask, count in masks]
        # What failed has waited as long as can be, and then did not load all of `work`.
        if all(arrived):
            self._shares.note(work, computed.row_layers, pace)
        blended = [
            Blended(
                logits,
                reuse.known,
                len(reuse.candidates),
                chosen,
                len(reuse.always),
                decision.share if reuse.reused.any() else 0.0,
            )
            for reuse, logits, chosen in zip(reuses, computed.logits, computed.num_chosen, strict=True)
        ]
        return blended, arrived

    def _work(self, reuses: Sequence[PromptReuse]) -> BatchWork:
        reused = sum(len(reuse.candidates) for reuse in reuses)
        return BatchWork(
            reused=reused,
            loaded=reused + sum(reuse.known - reuse.prompt.num_local for reuse in reuses),
            always=sum(len(reuse.always) for reuse in reuses),
            num_layers=self.model.num_layers,
            full_layers=self._full_layers,
        )

    def _count(self, blended: Sequence[Blended]) -> None:
        self._counters.add("blend_requests", len(blended))
        for name in ("known", "reused", "chosen", "computed"):
            self._counters.add(f"blend_tokens_{name}", sum(getattr(one, f"num_{name}") for one in blended))

    @torch.no_grad()
    def _compile(self) -> None:
        """Have the kernel of attention compiled, so that no request finds one that is not.

        Raises ConfigError where the cache is not the model's.
        """
        tokens = torch.zeros(1, dtype=torch.int64, device=self.model.device)
        angles = self.model.angles(tokens, 1)
        q, k, v = self.model.project(0, self.model.embed(tokens), angles)
        self._require_cache(k)
        self._rows.attend(q, k.repeat(2, 1, 1), v.repeat(2, 1, 1), tokens)

    def _require_cache(self, k: Tensor) -> None:
        layer = self._connector.layers[0]
        mine = (self.model.num_layers, *k.shape[1:], k.dtype)
        cached = (self._connector.num_layers, layer.heads, layer.width, layer.dtype)
        if mine != cached:
            raise ConfigError(
                f"the model's KV is {mine}, the cache's {cached} (layers, heads, head size, dtype): blending "
                "computes what the cache holds; register this model's cache, in the dtype it computes in"
            )

    def _checked(self, request: BlendRequest) -> CheckedBlend:
        return check_blend(request, self._connector.num_slots)

    def _loads(self, prompt: CheckedBlend, prefix: SegmentLoad | None) -> list[SegmentLoad]:
        """What to ask the tiers for: the prefix, then what is left of the segments behind it."""
        known = prompt.num_local if prefix is None else prefix.num_tokens
        may = [part for part in prompt.segments if self.segments.may_stand(part)]
        left = [part for part in may if part.end > known and len(prompt) >= self._min_tokens]
        rest = [self.segments.segment_load(prompt, part, known) for part in left]
        return rest if prefix is None else [prefix, *rest]


def _require_layers(selector: Selector, num_layers: int) -> None:
    last = selector.layers[-1] if isinstance(selector, ByChange) else getattr(selector, "layer", 0)
    if last >= num_layers:
        raise ConfigError(f"layer {last} is to be checked, but the model has layers 0 to {num_layers - 1}")


def _refuse_shared_slots(prompts: Sequence[CheckedBlend]) -> None:
    if len(prompts) < 2:
        return  # a prompt by itself was checked
    written = np.sort(np.concatenate([prompt.slots[prompt.num_local :] for prompt in prompts]))
    local = np.concatenate([prompt.slots[: prompt.num_local] for prompt in prompts])
    if (written[1:] == written[:-1]).any():
        raise RequestError("two prompts of a batch write to the same slot; each needs its own")
    if np.isin(written, local).any():
        raise RequestError("a prompt of a batch writes to a slot local to another one; each needs its own")
