"""A cache engine on paged caches of a given shape, with tokens to move."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lwkv.benchmarks.measuring.shapes import Shape
from lwkv.config.settings import Config
from lwkv.connectors import LayoutHints
from lwkv.engine import CacheEngine
from lwkv.metadata import CacheMetadata
from lwkv.platforms import Platform
from lwkv.pool.host_pool import PAGE_ALIGNMENT
from lwkv.storage import Tier
from lwkv.telemetry.timeline import Timeline

Slots = npt.NDArray[np.int64]

LAYOUTS = ("vllm_2bnhd", "vllm_b2nhd", "vllm_bhn2d")
MLA_LAYOUT = "vllm_mla"


class MeasuredEngine:
    """Caches of `shape` for `num_tokens` tokens in two places, random blocks both, and the engine on them.

    `source` and `target` are int64 (num_tokens,), the slots of the two places. Host memory for `prompts`
    whole prompts is page-locked at once, so that this is in nobody's time: a new prompt then takes the place
    of the one that was used least recently. Leaving a `with` block gives all of it back. `config` has
    settings beside those that the sizes ask for. Prompts are numbered from `first_prompt`: a tier that
    outlives this engine must not know them from a run before, whose bytes were others.
    """

    def __init__(
        self,
        platform: Platform,
        device: torch.device,
        shape: Shape,
        num_tokens: int,
        layout: str = LAYOUTS[-1],
        prompts: int = 4,
        tiers: Sequence[Tier] = (),
        timeline: Timeline | None = None,
        config: Mapping[str, Any] | None = None,
        first_prompt: int = 0,
    ) -> None:
        self.platform, self.device, self.shape, self.num_tokens = platform, device, shape, num_tokens
        per_place = -(-num_tokens // shape.block_size)
        layout = MLA_LAYOUT if shape.use_mla else layout
        self._memory = [_new_memory(shape, 2 * per_place, layout, device) for _ in range(shape.num_layers)]
        self.caches = [_as_registered(memory, layout) for memory in self._memory]
        blocks = np.random.default_rng(0).permutation(2 * per_place)
        self.source = _slots(blocks[:per_place], shape.block_size)[:num_tokens]
        self.target = _slots(blocks[per_place:], shape.block_size)[:num_tokens]
        self._numbers = itertools.count(first_prompt)
        self.engine = CacheEngine.create(
            _config(shape, num_tokens, prompts, config or {}),
            _metadata(shape),
            self.caches,
            layout_hints=LayoutHints(block_size=shape.block_size, layout=layout),
            platform=platform,
            tiers=tiers,
            timeline=timeline,
        )

    def new_prompt(self) -> Slots:
        """Token ids that no prompt before has, int64 (num_tokens,): nothing of it is known or skipped."""
        return np.arange(self.num_tokens, dtype=np.int64) + next(self._numbers) * self.num_tokens

    def fill(self) -> None:
        """Write random bytes to all caches, behind what the start of the engine queued.

        Where pages are coded, random values as a model's: of random bytes no page shrinks. For fp8 those that
        it keeps as they are.
        """
        self.platform.synchronize_device(self.device)
        for memory in self._memory:
            if self.engine.connector.codec.is_coded:
                scales = torch.rand(memory.shape[-1], device=memory.device).mul_(3).exp_()
                memory.normal_().mul_(scales)
                if self.engine.connector.codec.name == "fp8":
                    _coarsen(memory)
            else:
                memory.view(torch.uint8).random_(0, 256)

    def clear_target(self) -> None:
        """Write zeros to the target slots, which the source slots are not full of after `fill`."""
        target = self._place(self.target)
        for part in self._parts():
            part[target] = 0

    def keep(self, tokens: Slots) -> None:
        """See to it that all of `tokens` is cached: a prompt may have had to make room for a newer one.

        They are looked up, as a scheduler does, and stored from the source slots if need be.
        """
        if not self._is_cached(tokens):
            self.engine.store(tokens, slot_mapping=self.source[: len(tokens)])
            self.flush()
        if not self._is_cached(tokens):
            raise RuntimeError(f"{len(tokens)} tokens are not cached after they were stored")

    def flush(self) -> None:
        """Wait until all that was stored can be looked up, in every tier."""
        if not self.engine.flush():
            raise RuntimeError("not all was stored: a tier did not take it, or it took over 30 s")

    def load(self, tokens: Slots) -> None:
        """Load all layers of `tokens` into the target slots, behind the current stream's work."""
        self.engine.retrieve(tokens, slot_mapping=self.target[: len(tokens)])

    def places_agree(self, num_tokens: int | None = None) -> bool:
        """Whether the first target slots hold what the source slots hold, byte for byte, in whole chunks."""
        self.platform.synchronize_device(self.device)
        whole = self._whole(num_tokens or self.num_tokens)
        source, target = self._place(self.source[:whole]), self._place(self.target[:whole])
        return all(torch.equal(part[source], part[target]) for part in self._parts())

    def close(self) -> None:
        """Give everything back."""
        self.platform.synchronize_device(self.device)
        self.engine.close()
        self.caches.clear()
        self._memory.clear()

    def __enter__(self) -> MeasuredEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _whole(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self.shape.chunk_size

    def _is_cached(self, tokens: Slots) -> bool:
        return self.engine.lookup(tokens) == self._whole(len(tokens))

    def _place(self, slots: Slots) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.from_numpy(slots).to(self.device)
        return index // self.shape.block_size, index % self.shape.block_size

    def _parts(self) -> Iterator[torch.Tensor]:
        for layer in self.engine.connector.layers:
            yield from (part for part in (layer.k, layer.v) if part is not None)


def _config(shape: Shape, num_tokens: int, prompts: int, settings: Mapping[str, Any]) -> Config:
    page = -(-shape.chunk_size * shape.token_bytes // PAGE_ALIGNMENT) * PAGE_ALIGNMENT
    gib = prompts * shape.num_layers * (num_tokens // shape.chunk_size) * page / 2**30
    extra = {"reserve_gib": gib} | dict(settings.get("extra_config", {}))
    return Config(
        chunk_size=shape.chunk_size,
        use_layerwise=True,
        max_local_cpu_size=gib,
        **dict(settings) | {"extra_config": extra},
    )


def _metadata(shape: Shape) -> CacheMetadata:
    return CacheMetadata(
        shape.name,
        shape.num_layers,
        shape.num_kv_heads,
        shape.head_size,
        shape.dtype,
        use_mla=shape.use_mla,
    )


def _new_memory(shape: Shape, num_blocks: int, layout: str, device: torch.device) -> torch.Tensor:
    block, heads, size = shape.block_size, shape.num_kv_heads, shape.head_size
    sizes = {
        "vllm_mla": (num_blocks, block, size),
        "vllm_2bnhd": (2, num_blocks, block, heads, size),
        "vllm_b2nhd": (num_blocks, 2, block, heads, size),
        # Token by token in memory, as vLLM keeps it on GPUs; head by head in the logical shape.
        "vllm_bhn2d": (num_blocks, block, heads, 2 * size),
    }
    return torch.zeros(sizes[layout], dtype=shape.dtype, device=device)


def _coarsen(memory: torch.Tensor) -> None:
    """Leave four significant bits of floats, none of which is much smaller than others."""
    memory.copy_(torch.where(memory.abs() < 2.0**-5, 1, memory))
    words = memory.view({2: torch.int16, 4: torch.int32}[memory.itemsize])
    words.bitwise_and_(-1 << {torch.bfloat16: 4, torch.float16: 7, torch.float32: 20}[memory.dtype])


def _as_registered(memory: torch.Tensor, layout: str) -> torch.Tensor:
    return memory.transpose(1, 2) if layout == "vllm_bhn2d" else memory


def _slots(blocks: Slots, block_size: int) -> Slots:
    return (blocks[:, None] * block_size + np.arange(block_size)).ravel()
