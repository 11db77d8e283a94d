"""A hybrid engine on paged caches of a given shape, in groups as vLLM makes them, with a prompt to move."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import gcd

import numpy as np
import torch

from lwkv.benchmarks.measuring.shapes import Shape
from lwkv.config.settings import Config
from lwkv.hybrid import Group, HybridEngine, HybridSteps, Load, Store
from lwkv.keys import chunk_keys
from lwkv.kinds import ChunkSize
from lwkv.metadata import CacheMetadata
from lwkv.platforms import Platform
from lwkv.pool.host_pool import PAGE_ALIGNMENT

LOCKING_S = 60.0


class MeasuredHybrid:
    """Caches for `num_tokens` tokens in two places, and the engine on them.

    Groups have as many layers each as divide all kinds; layer i of each is the same memory, and groups are
    apart by their blocks. Host memory for `prompts` prompts of all layers is page-locked at once.

    Attributes:
        source, target: for each group the blocks of the two places, at random.
    """

    def __init__(
        self, platform: Platform, device: torch.device, shape: Shape, num_tokens: int, prompts: int = 2
    ) -> None:
        self.platform, self.device, self.shape, self.num_tokens = platform, device, shape, num_tokens
        self.kinds = shape.kinds()
        layers = gcd(*(kind.num_layers for kind in self.kinds))
        self._kind_of = [
            number for number, kind in enumerate(self.kinds) for _ in range(kind.num_layers // layers)
        ]
        per_place = num_tokens // shape.block_size
        blocks = 1 + np.random.default_rng(0).permutation(2 * per_place * len(self._kind_of))
        places = blocks.reshape(2, len(self._kind_of), per_place).tolist()
        self.source: list[list[int]] = places[0]
        self.target: list[list[int]] = places[1]
        sizes = (len(blocks) + 1, shape.block_size, shape.num_kv_heads, 2 * shape.head_size)
        self._memory = [torch.zeros(sizes, dtype=shape.dtype, device=device) for _ in range(layers)]
        self._numbers = itertools.count()
        self.engine = self._start(prompts)
        self._steps = HybridSteps(self.engine)

    def _start(self, prompts: int) -> HybridEngine:
        shape = self.shape
        page = -(-shape.chunk_size * shape.token_bytes // PAGE_ALIGNMENT) * PAGE_ALIGNMENT
        gib = prompts * shape.num_layers * (self.num_tokens // shape.chunk_size) * page / 2**30
        config = Config(use_layerwise=True, max_local_cpu_size=gib, extra_config={"reserve_gib": gib})
        metadata = CacheMetadata(
            shape.name, len(self._memory), shape.num_kv_heads, shape.head_size, shape.dtype
        )
        groups = [
            Group(
                kind,
                {
                    f"group {number} layer {i}": memory.transpose(1, 2)
                    for i, memory in enumerate(self._memory)
                },
                {"block_size": shape.block_size, "layout": "vllm_bhn2d"},
                metadata,
            )
            for number, kind in enumerate(self._kind_of)
        ]
        size = ChunkSize(shape.chunk_size, shape.block_size, shape.chunk_size)
        engine = HybridEngine(config, self.kinds, groups, size, self.platform)
        engine.wait_for_memory(LOCKING_S)
        return engine

    def fill(self) -> None:
        """Write random bytes to all caches, behind what the start of the engine queued."""
        self.platform.synchronize_device(self.device)
        for memory in self._memory:
            memory.view(torch.uint8).random_(0, 256)

    def new_prompt(self) -> list[bytes]:
        """The hashes of a prompt's chunks that no prompt before has."""
        first = next(self._numbers) * self.num_tokens
        ids = range(first, first + self.num_tokens)
        return [key.hash for key in chunk_keys([*ids], self.shape.chunk_size, self.engine.chain_name)]

    def store(self, hashes: list[bytes]) -> None:
        """Store a prompt from the source blocks, its windows at its end; it is there afterwards."""
        store = Store(hashes, 0, self.num_tokens, self.source)
        self._steps.begin((), [store])
        self._steps.start_load_kv()
        for name in self._names():
            self._steps.save_kv_layer(name)
        self._steps.wait_for_save()
        if not self.engine.flush():
            raise RuntimeError("not all was stored within 30 s")

    def load(self, hashes: list[bytes]) -> bool:
        """Queue the loads of all layers to the target blocks; whether all is there."""
        return self.engine.load_now([Load(hashes, 0, self.num_tokens, self.target)]) == [True]

    def clear_target(self) -> None:
        """Write zeros to the target blocks."""
        for _, target in self._blocks():
            for memory in self._memory:
                memory[target] = 0

    def places_agree(self) -> bool:
        """Whether the target has of each kind what is needed to go on behind the prompt, byte for byte."""
        self.platform.synchronize_device(self.device)
        return all(
            # As bytes: random ones are not always numbers, which equal themselves.
            torch.equal(memory[source].view(torch.uint8), memory[target].view(torch.uint8))
            for source, target in self._blocks()
            for memory in self._memory
        )

    def needed_bytes(self) -> int:
        """Bytes that a load of the prompt moves."""
        return (
            sum(len(source) for source, _ in self._blocks()) * len(self._memory) * self.kinds[0].block_bytes
        )

    def close(self) -> None:
        """Give everything back."""
        self.platform.synchronize_device(self.device)
        self.engine.close()
        self._memory.clear()

    def __enter__(self) -> MeasuredHybrid:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _names(self) -> Iterator[str]:
        """All layers, as a model goes through them: the groups in turns."""
        for i in range(len(self._memory)):
            yield from (f"group {number} layer {i}" for number in range(len(self._kind_of)))

    def _blocks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Of each group the blocks that are needed behind the prompt, of the source and of the target."""
        for number, source, target in zip(self._kind_of, self.source, self.target, strict=True):
            kind = self.kinds[number]
            first = kind.first_needed(self.num_tokens) // kind.block_size
            yield (
                torch.tensor(source[first:], device=self.device),
                torch.tensor(target[first:], device=self.device),
            )
