"""A toy model of several kinds of layers over one storage, as vLLM has it, and an engine that runs it.

Layer i of each group is the same memory: groups are apart by the numbers of their blocks alone. Every row of
a token, and every state, tells the layer and all tokens before it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import lcm

import numpy as np
import torch

from lwkv.config.settings import Config
from lwkv.hybrid import Group, HybridEngine, HybridSteps, Load, Store
from lwkv.keys import chunk_keys
from lwkv.kinds import ChunkSize, Kind, KindIndex, find_boundary
from lwkv.metadata import CacheMetadata
from lwkv.platforms import Platform

TOKEN_BYTES = 32  # K and V of one token: one head of four float32 each
PAGE = 256
GIB = 1 << 30


def full(block_size: int = 4, layers: int = 2) -> Kind:
    return Kind("full", block_size, layers, block_size * TOKEN_BYTES, ("float32",))


def window(span: int, block_size: int = 4, layers: int = 2) -> Kind:
    return Kind("window", block_size, layers, block_size * TOKEN_BYTES, ("float32",), span)


def local(span: int, block_size: int = 4, layers: int = 2) -> Kind:
    return Kind("local", block_size, layers, block_size * TOKEN_BYTES, ("float32",), span)


def state(block_size: int = 8, layers: int = 2, num_bytes: int = 100) -> Kind:
    return Kind("state", block_size, layers, num_bytes, ("float32",), tag="test")


class Watcher:
    """Brings what the engine keeps to the index, and remembers it."""

    def __init__(self, index: KindIndex) -> None:
        self._index = index
        self.has: dict[int, set[bytes]] = {}

    def kept(self, kind: int, hashes: Sequence[bytes]) -> None:
        assert not self.has.setdefault(kind, set()).intersection(hashes), "kept twice"
        self.has[kind].update(hashes)
        self._index.kept(0, kind, hashes)

    def dropped(self, kind: int, hashes: Sequence[bytes]) -> None:
        assert self.has[kind].issuperset(hashes), "dropped and never kept"
        self.has[kind].difference_update(hashes)
        self._index.dropped(0, kind, hashes)


@dataclass
class Running:
    """A request: its tokens, its block tables and how far it is computed."""

    tokens: list[int]
    hashes: list[bytes]
    tables: list[list[int]]
    computed: int = 0
    boundary: int = 0
    local: int = 0
    blocks: set[int] = field(default_factory=set)


class Toy:
    """The model, its caches and the engine.

    Args:
        kinds: of the model. groups_of: how many groups of each kind there are, each with two layers.
        pages: of host memory. settings: more of them.
    """

    def __init__(
        self,
        platform: Platform,
        device: torch.device,
        kinds: Sequence[Kind],
        groups_of: Sequence[int] | None = None,
        chunk_size: int | None = None,
        pages: int = 4000,
        blocks: int = 400,
        **settings: object,
    ) -> None:
        counts = groups_of or [1] * len(kinds)
        self.kinds = [
            Kind(k.form, k.block_size, 2 * n, k.block_bytes, k.dtypes, k.span, k.tag)
            for k, n in zip(kinds, counts, strict=True)
        ]
        self.group_kinds = [number for number, n in enumerate(counts) for _ in range(n)]
        unit = lcm(*(kind.block_size for kind in kinds))
        self.chunk = chunk_size or unit
        self.platform, self.device = platform, device
        self.memory = torch.zeros((blocks, 2, PAGE), dtype=torch.uint8, device=device)
        self.free = set(range(1, blocks))
        self._chance = random.Random(1)
        self._looked: list[tuple[str, list[torch.Tensor], list[np.ndarray]]] = []
        config = Config(
            use_layerwise=True,
            max_local_cpu_size=pages * 4096 / GIB,
            extra_config={"slab_bytes": 64 * 4096, "lookahead_layers": 1},
            **settings,
        )
        groups = [self._group(number, kind) for number, kind in enumerate(self.group_kinds)]
        size = ChunkSize(self.chunk, unit, 256)
        self.engine = HybridEngine(config, self.kinds, groups, size, platform)
        assert self.engine.wait_for_memory(20.0)
        self.index = KindIndex(self.kinds, self.chunk, 1)
        self.index.introduce(0)
        self.watcher = Watcher(self.index)
        self.engine.watcher = self.watcher
        self.steps = HybridSteps(self.engine)

    def names(self, group: int) -> list[str]:
        return [f"g{group}.layer{i}" for i in range(2)]

    def _group(self, number: int, kind_number: int) -> Group:
        kind = self.kinds[kind_number]
        caches = {name: self._view(kind, i) for i, name in enumerate(self.names(number))}
        form = (
            {"num_kv_heads": 1, "head_size": 4}
            if kind.form != "state"
            else {"num_kv_heads": 1, "head_size": 1}
        )
        dtype = torch.uint8 if kind.form == "state" else torch.float32
        metadata = CacheMetadata("toy", 2, dtype=torch.float32, kv_dtype=dtype, **form)
        return Group(kind_number, caches, {"block_size": kind.block_size}, metadata)

    def _view(self, kind: Kind, layer: int) -> torch.Tensor:
        pages = self.memory[:, layer]
        if kind.form == "state":
            return pages[:, : kind.block_bytes]
        rows = pages[:, : kind.block_bytes].view(torch.float32)
        size = kind.block_size
        return rows.as_strided(
            (len(pages), 2, size, 1, 4), (rows.stride(0), size * 4, 4, 4, 1), rows.storage_offset()
        )

    # What must be there.

    def row(self, name: str, tokens: Sequence[int], num_bytes: int) -> np.ndarray:
        digest = blake2b(f"{name} {list(tokens)}".encode()).digest()
        return np.frombuffer(digest * (num_bytes // len(digest) + 1), np.uint8)[:num_bytes]

    def _place(self, kind: Kind, block: int, layer: int, offset: int) -> list[torch.Tensor]:
        """The bytes of a token: of K, and of V."""
        page, half = self.memory[block, layer], kind.block_bytes // 2
        return [page[part * half + offset * 16 : part * half + offset * 16 + 16] for part in (0, 1)]

    def write(self, request: Running, group: int, layer: int, start: int, end: int) -> None:
        """As the model does when it computes tokens [start, end)."""
        kind, name = self.kinds[self.group_kinds[group]], self.names(group)[layer]
        table, tokens = request.tables[group], request.tokens
        if kind.form == "state":
            block = table[-(-end // kind.block_size) - 1]
            value = self.row(name, tokens[:end], kind.block_bytes)
            self._queue(self.memory[block, layer, : kind.block_bytes], value)
            return
        for t in range(start, end):
            block = table[t // kind.block_size]
            value = self.row(name, tokens[: t + 1], TOKEN_BYTES)
            for part, place in enumerate(self._place(kind, block, layer, t % kind.block_size)):
                self._queue(place, value[16 * part : 16 * part + 16])

    def _queue(self, place: torch.Tensor, value: np.ndarray) -> None:
        data = torch.from_numpy(value.copy())
        self.platform.launch(self.platform.current_stream(self.device), lambda: place.copy_(data))

    def look(self, loads: Sequence[tuple[Running, Load]], group: int, layer: int) -> None:
        """Queue what a layer reads of requests that go on at a boundary, to be compared at the end."""
        kind, name = self.kinds[self.group_kinds[group]], self.names(group)[layer]
        for request, load in loads:
            pieces, wanted = self._needed(request, load.boundary, group, layer)
            found: list[torch.Tensor] = []
            self.platform.launch(
                self.platform.current_stream(self.device),
                lambda found=found, pieces=pieces: found.extend(piece.clone() for piece in pieces),
            )
            self._looked.append((f"{name} of {kind.name} at {load.boundary}", found, wanted))

    def _needed(
        self, request: Running, boundary: int, group: int, layer: int
    ) -> tuple[list[torch.Tensor], list[np.ndarray]]:
        """Where it is, and what it must be."""
        kind, name, tokens = self.kinds[self.group_kinds[group]], self.names(group)[layer], request.tokens
        table = request.tables[group]
        if kind.form == "state":
            block = table[boundary // kind.block_size - 1]
            wanted = self.row(name, tokens[:boundary], kind.block_bytes)
            return [self.memory[block, layer, : kind.block_bytes]], [wanted]
        places, rows = [], []
        for t in range(kind.first_needed(boundary, request.local), boundary):
            places += self._place(kind, table[t // kind.block_size], layer, t % kind.block_size)
            rows += np.split(self.row(name, tokens[: t + 1], TOKEN_BYTES), 2)
        return places, rows

    def check(self) -> None:
        """Compare all that was looked at."""
        self.platform.synchronize_device(self.device)
        for what, found, wanted in self._looked:
            assert len(found) == len(wanted), what
            for got, row in zip(found, wanted, strict=True):
                assert (got.cpu().numpy() == row).all(), what
        self._looked.clear()

    # What an engine does.

    def hashes(self, tokens: Sequence[int]) -> list[bytes]:
        return [key.hash for key in chunk_keys(list(tokens), self.chunk, self.engine.chain_name)]

    def boundary(self, tokens: Sequence[int], local: int = 0) -> int:
        return self.index.boundary(self.hashes(tokens), len(tokens), local)

    def start(self, tokens: Sequence[int]) -> Running:
        return Running(list(tokens), self.hashes(tokens), [[] for _ in self.group_kinds])

    def _block(self, request: Running) -> int:
        block = self._chance.choice(sorted(self.free))
        self.free.discard(block)
        request.blocks.add(block)
        return block

    def allocate(self, request: Running, first: Sequence[int], end: int) -> None:
        """Give each group blocks for tokens from `first` of it to `end`; null blocks before."""
        for group, number in enumerate(self.group_kinds):
            size, table = self.kinds[number].block_size, request.tables[group]
            while len(table) * size < end:
                needed = (len(table) + 1) * size > first[group]
                table.append(self._block(request) if needed else 0)

    def load(self, request: Running, boundary: int) -> Load:
        request.boundary = request.computed = boundary
        first = [self.kinds[n].first_needed(boundary, request.local) for n in self.group_kinds]
        self.allocate(request, first, boundary)
        return Load(request.hashes, request.local, boundary, request.tables)

    def slide(self, request: Running) -> None:
        """Free what no layer looks at any more; states keep those of the last boundary."""
        for group, number in enumerate(self.group_kinds):
            kind, table = self.kinds[number], request.tables[group]
            here = request.computed // kind.block_size * kind.block_size
            for i in range(min(kind.first_needed(here) // kind.block_size, len(table))):
                if table[i]:
                    self.free.add(table[i])
                    request.blocks.discard(table[i])
                    table[i] = 0

    def end(self, request: Running) -> None:
        self.free |= request.blocks
        request.blocks.clear()

    def run_step(
        self, loads: Sequence[tuple[Running, Load]], parts: Sequence[tuple[Running, int]], **store_as: object
    ) -> None:
        """One step: load, compute each request of `parts` up to its end, store."""
        stores = []
        for request, end in parts:
            self.allocate(request, [request.computed] * len(self.group_kinds), end)
            stores.append(Store(request.hashes, request.computed, end, request.tables, **store_as))
        self.steps.begin([load for _, load in loads], stores)
        self.steps.start_load_kv()
        # Layers of state have no hooks: they may run before the first one.
        for group in self._groups_of_states():
            for layer in range(2):
                self.look(loads, group, layer)
        for layer, group in self._hooks():
            name = self.names(group)[layer]
            self.steps.wait_for_layer_load(name)
            self.look(loads, group, layer)
            self._compute(parts, layer, group)
            self.steps.save_kv_layer(name)
        for group in self._groups_of_states():
            for layer in range(2):
                self._compute(parts, layer, group)
        result = self.steps.wait_for_save()
        assert result.loaded == [True] * len(loads)
        self.check()
        for request, end in parts:
            request.computed = end
            self.slide(request)

    def _groups_of_states(self) -> list[int]:
        return [g for g, n in enumerate(self.group_kinds) if self.kinds[n].form == "state"]

    def _hooks(self) -> Iterator[tuple[int, int]]:
        """Attention layers alone have hooks."""
        states = self._groups_of_states()
        attention = [group for group in range(len(self.group_kinds)) if group not in states]
        yield from ((layer, group) for layer in range(2) for group in attention)

    def _compute(self, parts: Sequence[tuple[Running, int]], layer: int, group: int) -> None:
        for request, end in parts:
            self.write(request, group, layer, request.computed, end)

    def ask(self, tokens: Sequence[int], step: int = 1 << 20, settles: bool = False) -> int:
        """A whole request, alone, in steps of so many tokens: what was found of it.

        Args:
            settles: whether the stores of a step end before the next one begins. What is under way cannot be
                evicted, so what little memory keeps depends on that.
        """
        request = self.start(tokens)
        found = self.boundary(tokens)
        pin = self.engine.pin(request.hashes, 0, found) if found else None
        assert not found or pin is not None, "what is found can be pinned"
        loads = [(request, self.load(request, found))] if found else []
        while request.computed < len(tokens):
            # Steps of a prefill end on blocks of states.
            end = min(request.computed + step, len(tokens))
            if end < len(tokens):
                end = end // self.chunk * self.chunk
            last = len(tokens) // self.chunk * self.chunk
            if any(kind.form == "state" for kind in self.kinds) and request.computed < last < end:
                end = last
            self.run_step(loads, [(request, end)])
            loads = []
            assert not settles or self.engine.flush(20.0)
        if pin is not None:
            self.engine.unpin(pin)
        self.end(request)
        assert self.engine.flush(20.0)
        return found

    def rest(self) -> None:
        """Nothing is pinned or on its way, and each page is a chunk's."""
        assert self.engine.flush(20.0)
        stats = self.engine.stats()
        assert stats["pins"] == stats["writes_in_flight"] == 0
        assert stats["page_references"] == stats["pages_in_use"]

    def close(self) -> None:
        self.rest()
        self.engine.close()
        assert self.engine.stats()["pages_in_use"] == 0
        self.memory = self.memory[:0]


def largest(toy: Toy, tokens: Sequence[int], has: Sequence[set[bytes]]) -> int:
    """The boundary by what is kept of each kind."""
    hashes = toy.hashes(tokens)
    present = [np.array([h in own for h in hashes], bool) for own in has]
    return find_boundary(toy.kinds, toy.chunk, len(tokens), 0, present)
