"""Segments in the tiers: keyed on their content, and loaded to wherever a prompt has them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from lwkv.blend.forward.rows import PromptReuse
from lwkv.blend.request import CheckedBlend, Segment
from lwkv.blend.shared_prefix import SharedPrefix, shared_prefix_ids
from lwkv.connectors.buffer import BufferConnector
from lwkv.connectors.loader import Load
from lwkv.engine import CacheEngine
from lwkv.errors import ConfigError
from lwkv.keys import ChunkKey, TokenIds, chunk_keys
from lwkv.pipeline.retrieval import BatchRetrieval
from lwkv.pipeline.store import BatchStoring
from lwkv.platforms import Event
from lwkv.platforms.protocol import Int64s
from lwkv.request import Request, check_stores
from lwkv.transfer import NO_SLOT, CheckedRequest, Chunking, Transfer

NAMESPACE = "segment"


@dataclass(frozen=True, slots=True, eq=False)
class SegmentLoad:
    """One part of a prompt to load, if it is cached: tokens [start, end), whose keys are `keys`.

    `shift` is where a key is used less where it was computed. A prefix is loaded like a segment, by the
    engine's own keys. `is_exact` where an ordinary prefill would give the same KV.
    """

    request: CheckedRequest
    keys: list[ChunkKey]
    start: int
    shift: int
    is_exact: bool

    @property
    def num_tokens(self) -> int:
        """Tokens of it that are in place already, or are to be loaded."""
        slots = self.request.slots
        return self.request.first + int((slots[self.request.first :] != NO_SLOT).sum())


class SegmentCache:
    """The segments beside the prefixes of one cache engine, in the same tiers.

    Keys have a namespace of their own and cover the shared prefix: a segment that was computed behind
    another one has other bytes.

    Args:
        engine: with `enable_blending`; whoever made it closes it.
        shared_prefix: what every segment was, and is, computed behind; as of `Blender`.

    Raises:
        ConfigError: an engine without the buffer connector; no shared prefix.
        RequestError: a shared prefix that is no ids.
    """

    def __init__(self, engine: CacheEngine, shared_prefix: SharedPrefix | None) -> None:
        if not isinstance(engine.connector, BufferConnector):
            raise ConfigError("blending needs the buffer connector: set enable_blending and use_layerwise")
        self.engine = engine
        self.connector: BufferConnector = engine.connector
        self.shared_prefix = shared_prefix_ids(shared_prefix)
        self._chunking = Chunking(engine.config.chunk_size, partial=True)

    def keys(self, tokens: TokenIds, salts: Sequence[str] = ()) -> list[ChunkKey]:
        """The keys of a segment's chunks, the last of which may be smaller."""
        chunk_size, namespace = self._chunking.chunk_size, self.engine.namespace
        return segment_keys(tokens, chunk_size, namespace, self.shared_prefix, salts)

    def num_cached(self, tokens: Int64s, salts: Sequence[str] = ()) -> int:
        """How many leading tokens of a segment are cached, in any tier."""
        found = self.engine.parts().storage.lookup(self.keys(tokens, salts))
        return int(self._chunking.chunk_tokens(len(tokens))[:found].sum())

    def prefix_load(self, prompt: CheckedBlend) -> SegmentLoad | None:
        """The prompt's leading tokens as an ordinary prefill has stored them; None where none are cached."""
        hit = min(self.engine.lookup(prompt.ids, prompt.salts), len(prompt) - 1)
        return self.exact_load(prompt, hit) if hit > prompt.num_local else None

    def exact_load(self, prompt: CheckedBlend, hit: int) -> SegmentLoad:
        """The prompt's first `hit` tokens, less the local ones, as an ordinary prefill has stored them."""
        chunk_size = self._chunking.chunk_size
        end = min(-(-hit // chunk_size) * chunk_size, len(prompt))
        slots = prompt.slots[:end].copy()
        slots[hit:] = NO_SLOT
        chunking = self._chunking._replace(partial=self.engine.config.save_unfull_chunk)
        request = _part(prompt, prompt.ids[:end], slots, prompt.num_local, chunking)
        return SegmentLoad(request, self.engine.parts().keys_of(request), 0, 0, is_exact=True)

    def segment_load(self, prompt: CheckedBlend, segment: Segment, first: int) -> SegmentLoad:
        """A segment's tokens from number `first` of the prompt on."""
        tokens, slots = prompt.ids[segment.start : segment.end], prompt.slots[segment.start : segment.end]
        slots = slots.copy()
        if segment.end == len(prompt):
            slots[-1] = NO_SLOT  # the last token's logits are wanted
        local = min(max(first - segment.start, 0), len(tokens))
        request = _part(prompt, tokens, slots, local, self._chunking)
        shift = segment.start - len(self.shared_prefix)
        keys = self.keys(tokens, prompt.salts)
        return SegmentLoad(request, keys, segment.start, shift, self.is_exact(segment))

    def may_stand(self, segment: Segment) -> bool:
        """Whether it is reused at all: not at the beginning of a prompt if it was computed behind something.

        What stands first draws attention to itself, which the shared prefix has drawn off it.
        """
        return segment.start > 0 or not self.shared_prefix

    def is_exact(self, segment: Segment) -> bool:
        """Whether nothing stands before it, and nothing did when it was computed."""
        return segment.start == 0 and not self.shared_prefix

    def retrieval(
        self, loads: Sequence[SegmentLoad], behind: Event | None = None, in_host: Collection[int] = ()
    ) -> BatchRetrieval:
        """What loads them; the caller closes it.

        Args:
            behind: as in `InPlaceLoader.begin_load`.
            in_host: numbers of loads of which only what is in host memory is taken.
        """
        keys = {id(load.request): load.keys for load in loads}
        parts = self.engine.parts().with_keys(lambda request: keys[id(request)])

        def begin_load(transfers: list[Transfer], pages: Int64s | None) -> Load:
            shift, lengths = [load.shift for load in loads], [len(part.slots) for part in transfers]
            shifts = np.repeat(np.array(shift, np.int64), lengths) if any(shift) else None
            return loader.begin_load(Transfer.join(transfers), pages, shifts, behind)

        # What computes reads and writes the engine's blocks.
        loader = self.connector.in_place
        requests = [load.request for load in loads]
        return BatchRetrieval(requests, parts, loader=loader, begin_load=begin_load, in_host=in_host)

    def storing(self, tokens: TokenIds, slots: Int64s, salts: Sequence[str] = ()) -> BatchStoring:
        """What stores a segment that is being computed in `slots`; the caller closes it."""
        request = Request(tokens, slots, salts=salts)
        checked = check_stores([request], self.connector.num_slots, self._chunking)
        keys = self.keys(tokens, salts)
        return BatchStoring(checked, self.engine.parts().with_keys(lambda _: keys))


def segment_keys(
    tokens: TokenIds,
    chunk_size: int,
    namespace: str,
    shared_prefix: Sequence[int],
    salts: Sequence[str] = (),
) -> list[ChunkKey]:
    """The keys of the chunks of a segment that was computed behind `shared_prefix`.

    Args:
        namespace: of the engine's own keys.
    """
    salts = (",".join(map(str, shared_prefix)), *salts)
    return chunk_keys(tokens, chunk_size, f"{namespace}-{NAMESPACE}", salts, partial=True)


def _part(
    prompt: CheckedBlend, tokens: Int64s, slots: Int64s, num_local: int, chunking: Chunking
) -> CheckedRequest:
    """A part of a prompt, which was checked as a whole."""
    counts = chunking.chunk_tokens(len(tokens))
    return CheckedRequest(tokens, slots, num_local, prompt.salts, chunking.chunk_size, counts)


def lay_out(prompt: CheckedBlend, loads: Sequence[SegmentLoad], counts: Sequence[int]) -> PromptReuse:
    """What is known of a prompt whose `loads`, ascending, will bring so many tokens each."""
    known, reused, starts = prompt.num_local, np.zeros(len(prompt), bool), []
    for load, count in zip(loads, counts, strict=True):
        first = load.start + load.request.first
        if load.is_exact and first <= known:
            known = first + count
        elif count:
            reused[first : first + count] = True
            starts.append(first)
    return PromptReuse(prompt, known, reused, tuple(starts))
