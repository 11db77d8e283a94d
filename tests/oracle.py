"""Paged caches that know what they must hold: every element tells its layer, part, token, head and dimension.

A token's row depends on all tokens before it, as a model's does. `Oracle` keeps the caches under test and a
copy on the host that only the test changes; `check` compares all of their memory, padding included.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lwkv.codecs.fp8_form import Fp8Form
from lwkv.codecs.lossless_form import LosslessForm
from lwkv.config.settings import Config
from lwkv.connectors import BufferConnector
from lwkv.engine import CacheEngine
from lwkv.keys import ChunkKey, LayerKey
from lwkv.layouts.layout import KVSpec, describe_layers
from lwkv.metadata import CacheMetadata
from lwkv.platforms import Platform
from lwkv.storage import Status

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
SENTINEL = 0x5A
GIB = 1 << 30
PAGE_STRIDE = 4096
LEAST = -1
"""Staging of one page for each buffer."""


@dataclass(frozen=True)
class Dims:
    """Sizes of the caches, few and odd."""

    layers: int = 3
    blocks: int = 16
    block_size: int = 4
    heads: int = 2
    head_size: int = 3
    dtype: torch.dtype = torch.float32

    @property
    def slots(self) -> int:
        return self.blocks * self.block_size


class WrongBytesError(AssertionError):
    """Memory does not hold what it must."""


Views = tuple[Any, Tensor, "Tensor | None"]  # registered, K and V as [blocks, tokens, heads, elements]


def _empty(shape: Sequence[int], dims: Dims, device: torch.device) -> Tensor:
    count = int(np.prod(shape)) * dims.dtype.itemsize
    return torch.full((count,), SENTINEL, dtype=torch.uint8, device=device).view(dims.dtype).view(*shape)


def _split(t: Tensor, axis: int, order: str) -> Views:
    """K and V of a tensor with both on `axis`; `order` names the other axes of the tensor."""
    place = [order.index(axis) for axis in "BNHD"]
    k, v = (part.permute(place) for part in t.unbind(axis))
    return t, k, v


def _one_by_one(make: Callable[[Dims, torch.device], Views]) -> Callable[[Dims, torch.device], list[Views]]:
    return lambda dims, device: [make(dims, device) for _ in range(dims.layers)]


def _bnhd(order: str, dims: Dims) -> list[int]:
    sizes = dict(zip("BNHD2E", [dims.blocks, dims.block_size, dims.heads, dims.head_size, 2], strict=False))
    return [sizes[axis] for axis in order]


def _plain(order: str) -> Callable[[Dims, torch.device], list[Views]]:
    axis = order.index("2")
    return _one_by_one(
        lambda dims, device: _split(_empty(_bnhd(order, dims), dims, device), axis, order.replace("2", ""))
    )


def _head_first(dims: Dims, device: torch.device) -> Views:
    """Shape (2, B, N, H, D) over memory in the order (2, B, H, N, D)."""
    t = _empty(_bnhd("2BHND", dims), dims, device).transpose(2, 3)
    return t, t[0], t[1]


def _side_by_side(physical: str) -> Callable[[Dims, torch.device], list[Views]]:
    def make(dims: Dims, device: torch.device) -> Views:
        t = _empty([*_bnhd(physical, dims), 2 * dims.head_size], dims, device)
        t = t.permute([physical.index(axis) for axis in "BHN"] + [3])
        k, v = (part.transpose(1, 2) for part in t.split(dims.head_size, -1))
        return t, k, v

    return _one_by_one(make)


def _cross_layer(dims: Dims, device: torch.device) -> list[Views]:
    """All layers of a block next to each other, in one storage."""
    everything = _empty([dims.blocks, dims.layers, *_bnhd("2NHD", dims)], dims, device)
    return [_split(everything[:, i], 1, "BNHD") for i in range(dims.layers)]


def _padded(dims: Dims, device: torch.device) -> Views:
    """Gaps behind tokens and blocks, nothing behind the last block, and an offset in front."""
    row = dims.heads * dims.head_size
    token, block = row + 3, dims.block_size * (row + 3) + 5
    part, offset = dims.blocks * block + 7, 11
    needed = offset + part + (dims.blocks - 1) * block + (dims.block_size - 1) * token + row
    memory = _empty([needed], dims, device)
    t = memory.as_strided(_bnhd("2BNHD", dims), (part, block, token, dims.head_size, 1), offset)
    return t, t[0], t[1]


def _mla(*before_tokens: int) -> Callable[[Dims, torch.device], list[Views]]:
    def make(dims: Dims, device: torch.device) -> Views:
        t = _empty([dims.blocks, *before_tokens, dims.block_size, dims.head_size], dims, device)
        return t, t.view(dims.blocks, dims.block_size, 1, dims.head_size), None

    return _one_by_one(make)


def _sglang(dims: Dims, device: torch.device) -> Views:
    k, v = (_empty([dims.slots, dims.heads, dims.head_size], dims, device) for _ in range(2))
    shape = _bnhd("BNHD", dims)
    return [k, v], k.view(*shape), v.view(*shape)


def _sglang_hnd(dims: Dims, device: torch.device) -> Views:
    k, v = (_empty(_bnhd("BHND", dims), dims, device) for _ in range(2))
    return [k, v], k.transpose(1, 2), v.transpose(1, 2)


def _sglang_mla(dims: Dims, device: torch.device) -> Views:
    t = _empty([dims.slots, 1, dims.head_size], dims, device)
    return t, t.view(dims.blocks, dims.block_size, 1, dims.head_size), None


def _opaque(dims: Dims, device: torch.device) -> Views:
    t = _empty([dims.blocks, 2 * dims.block_size * dims.heads * dims.head_size], dims, device)
    k, v = t.view(*_bnhd("B2NHD", dims)).unbind(1)
    return t, k, v


@dataclass(frozen=True)
class Form:
    """One way to keep the caches: how to make them, and what has to be declared."""

    make: Callable[[Dims, torch.device], list[Views]]
    engine: str = "vllm"
    mla: bool = False
    hints: dict[str, Any] = field(default_factory=dict)


FORMS = {
    "vllm_2bnhd": Form(_plain("2BNHD")),
    "vllm_b2nhd": Form(_plain("B2NHD")),
    "vllm_2bhnd": Form(_plain("2BHND"), hints={"layout": "vllm_2bhnd"}),
    "vllm_b2hnd": Form(_plain("B2HND"), hints={"layout": "vllm_b2hnd"}),
    "head first in memory only": Form(_one_by_one(_head_first)),
    "vllm_bhn2d": Form(_side_by_side("BHN")),
    "vllm_bhn2d, token first in memory": Form(_side_by_side("BNH")),
    "cross-layer": Form(_cross_layer),
    "padded": Form(_one_by_one(_padded)),
    "vllm_mla": Form(_mla(), mla=True),
    "vllm_mla with a head axis": Form(_mla(1), mla=True),
    "sglang_kv": Form(_one_by_one(_sglang), engine="sglang"),
    "sglang_kv_hnd": Form(_one_by_one(_sglang_hnd), engine="sglang"),
    "sglang_mla": Form(_one_by_one(_sglang_mla), engine="sglang", mla=True),
    "opaque": Form(_one_by_one(_opaque), hints={"layout": "opaque", "opaque_tag": "test"}),
}


class Oracle:
    """Caches on a device, and what they must hold. Device work goes to the current stream.

    Args:
        coarse: what a model computes are numbers that fp8 pages keep as they are.
    """

    def __init__(
        self,
        platform: Platform,
        device: torch.device,
        form: str = "vllm_2bnhd",
        dims: Dims | None = None,
        coarse: bool = False,
    ) -> None:
        self._coarse = coarse
        self.platform, self.device, self.form = platform, device, FORMS[form]
        self.dims = dims or Dims()
        self._actual = self.form.make(self.dims, device)
        self._expected = self.form.make(self.dims, torch.device("cpu"))
        self._numbers: dict[tuple[int | str | None, int], int] = {}
        self._readings: list[tuple[str, Tensor, list[Tensor]]] = []

    @property
    def kvcaches(self) -> Any:
        registered = [views[0] for views in self._actual]
        return (
            registered
            if self.form.engine == "sglang"
            else {f"layer_{i}": t for i, t in enumerate(registered)}
        )

    @property
    def metadata(self) -> CacheMetadata:
        dims = self.dims
        heads = 1 if self.form.mla else dims.heads
        return CacheMetadata(
            "toy",
            dims.layers,
            heads,
            dims.head_size,
            dims.dtype,
            kv_dtype=dims.dtype,
            use_mla=self.form.mla,
            rope="theta 10000",
        )

    @property
    def page_bytes(self) -> Callable[[int], int]:
        parts, heads = (1, 1) if self.form.mla else (2, self.dims.heads)
        return lambda tokens: parts * heads * tokens * self.dims.head_size * self.dims.dtype.itemsize

    def engine(
        self,
        chunk_size: int = 8,
        pages: int = 64,
        tiers: Sequence[Any] = (),
        staging_bytes: int | None = LEAST,
        lookahead: int = 1,
        staging_buffers: int = 2,
        group_bytes: int = 0,
        host_timeout_s: float = 30.0,
        load_streams: int = 2,
        **settings: Any,
    ) -> CacheEngine:
        """An engine whose staging holds a chunk and whose pool has `pages` pages in slabs of five."""
        stride = -(-self.page_bytes(chunk_size) // PAGE_STRIDE) * PAGE_STRIDE
        buffers = staging_buffers + (2 * staging_buffers if load_streams == 2 else 1)
        least = buffers * self.page_bytes(chunk_size)
        if (codec := settings.get("page_codec")) in ("lossless", "fp8"):
            least = buffers * self._coded_bytes(chunk_size, codec) + 2 * self.page_bytes(chunk_size)
        extra = {
            "staging_bytes": least if staging_bytes == LEAST else staging_bytes,
            "staging_buffers": staging_buffers,
            "lookahead_layers": lookahead,
            "load_streams": load_streams,
            "group_bytes": group_bytes,
            "slab_bytes": 5 * stride,
            "host_memory_timeout_s": host_timeout_s,
        }
        config = Config(
            chunk_size=chunk_size,
            max_local_cpu_size=pages * stride / GIB,
            extra_config=extra,
            **{"use_layerwise": True} | settings,
        )
        if config.enable_blending:
            return CacheEngine(config, self.metadata, self._buffer_connector(config), tiers)
        hints = {"block_size": self.dims.block_size, **self.form.hints}
        engine = CacheEngine.create(
            config, self.metadata, self.kvcaches, self.form.engine, hints, self.platform, tiers
        )
        assert engine.wait_for_memory(20.0), "host memory is page-locked in the background"
        return engine

    def _coded_bytes(self, chunk_size: int, codec: str) -> int:
        """Bytes of a page of this codec."""
        parts, heads = (1, 1) if self.form.mla else (2, self.dims.heads)
        rows, width = parts * heads * chunk_size, self.dims.head_size
        form = LosslessForm(rows, width) if codec == "lossless" else Fp8Form(rows, width, self.dims.dtype)
        return form.page_bytes

    def _buffer_connector(self, config: Config) -> BufferConnector:
        """Made here and not by CreateGPUConnector: it must work on platforms not yet shown to blend, too."""
        metadata, hints = self.metadata, self.form.hints
        spec = KVSpec(metadata.num_kv_heads, metadata.head_size, self.dims.block_size, metadata.use_mla)
        layout, opaque_tag = hints.get("layout"), hints.get("opaque_tag")
        describe = partial(describe_layers, spec=spec, layout=layout, opaque_tag=opaque_tag)
        connector = BufferConnector(config, self.platform, describe)
        connector.register(self.kvcaches)
        return connector

    def rows(self, tokens: Sequence[int], layer: int, salt: str | None = None) -> Tensor:
        """What a model computes for `tokens` in one layer, integers [2, T, heads, head_size] on the host."""
        dims, numbers = self.dims, []
        parent: int | str | None = salt
        for token in tokens:
            parent = self._numbers.setdefault((parent, token), len(self._numbers))
            numbers.append(parent)
        inner = torch.arange(2 * dims.heads * dims.head_size).view(2, 1, dims.heads, dims.head_size)
        row = torch.tensor(numbers, dtype=torch.int64).view(1, -1, 1, 1) * dims.layers + layer
        own = row * inner.numel() + inner + 1
        return coarse_values(own, dims.dtype) if self._coarse else own.to(WORDS[dims.dtype.itemsize])

    def compute(
        self, tokens: Sequence[int], slots: Any, layers: Sequence[int] | None = None, salt: str | None = None
    ) -> None:
        """Queue the model's writing of `tokens` to `slots`, -1 for none, and expect it."""
        for layer in self._layers(layers):
            self._write(layer, slots, self.rows(tokens, layer, salt))

    def zero(self, slots: Any, layers: Sequence[int] | None = None) -> None:
        """Queue a zero-fill of `slots`, and expect it."""
        for layer in self._layers(layers):
            self._write(layer, slots, torch.zeros_like(self.rows(range(len(slots)), layer)))

    def expect(
        self,
        tokens: Sequence[int],
        slots: Any,
        where: Any = None,
        layers: Sequence[int] | None = None,
        salt: str | None = None,
    ) -> None:
        """From now on `slots` hold what `tokens` are computed to; only those where `where`, bool (T,)."""
        chosen = np.array(slots, np.int64)
        if where is not None:
            chosen[~np.asarray(where, bool)] = -1
        for layer in self._layers(layers):
            self._put(self._expected[layer], chosen, self.rows(tokens, layer, salt))

    def forget(self, slots: Any, where: Any) -> None:
        """Take whatever `slots` hold now, where `where`, bool (T,), as right."""
        self.platform.synchronize_device(self.device)
        chosen = np.asarray(slots, np.int64)[np.asarray(where, bool)]
        for (_, k, v), (_, wanted_k, wanted_v) in zip(self._actual, self._expected, strict=True):
            for got, wanted in zip(_parts(k, v), _parts(wanted_k, wanted_v), strict=True):
                place = chosen // self.dims.block_size, chosen % self.dims.block_size
                _words(wanted)[place] = self._rows_of(got, chosen).cpu()

    def read(
        self, tokens: Sequence[int], slots: Any, layer: int, name: str = "", salt: str | None = None
    ) -> None:
        """Queue the model's reading of `slots`, which must find what `tokens` are computed to."""
        self._read(slots, layer, self.rows(tokens, layer, salt), name)

    def check(self) -> None:
        """Wait for the device and compare everything."""
        self.platform.synchronize_device(self.device)
        for name, wanted, found in self._readings:
            assert len(found) == 1, f"{name} was never read"
            _compare(name, found[0].cpu(), wanted)
        self._readings.clear()
        for layer in range(self.dims.layers):
            self._compare_layer(layer)
        for actual, expected in zip(self._actual, self._expected, strict=True):
            for a, b in zip(_tensors(actual[0]), _tensors(expected[0]), strict=True):
                if not torch.equal(_memory(a).cpu(), _memory(b)):
                    raise WrongBytesError("memory between the rows was written")

    def _layers(self, layers: Sequence[int] | None) -> Sequence[int]:
        return range(self.dims.layers) if layers is None else layers

    def _write(self, layer: int, slots: Any, rows: Tensor) -> None:
        self._put(self._expected[layer], np.asarray(slots, np.int64), rows)
        self._queue(lambda: self._put(self._actual[layer], np.asarray(slots, np.int64), rows))

    def _read(self, slots: Any, layer: int, wanted: Tensor, name: str) -> None:
        found: list[Tensor] = []
        _, k, v = self._actual[layer]
        wanted = wanted[:1, :, : k.shape[2]] if v is None else wanted
        self._readings.append((f"{name or 'reading'} of layer {layer}", wanted, found))
        self._queue(lambda: found.append(torch.stack([self._rows_of(t, slots) for t in _parts(k, v)])))

    def _queue(self, work: Callable[[], object]) -> None:
        self.platform.launch(self.platform.current_stream(self.device), work)

    def _rows_of(self, view: Tensor, slots: Any) -> Tensor:
        place = torch.from_numpy(np.asarray(slots, np.int64)).to(view.device)
        return _words(view)[place // self.dims.block_size, place % self.dims.block_size]

    def _put(self, views: Views, slots: Any, rows: Tensor) -> None:
        slots = np.asarray(slots, np.int64)
        moved = slots != -1
        _, k, v = views
        place = torch.from_numpy(slots[moved]).to(k.device)
        for view, part in zip(_parts(k, v), rows, strict=False):
            wanted = part[torch.from_numpy(moved)][:, : view.shape[2]].to(k.device)
            _words(view)[place // self.dims.block_size, place % self.dims.block_size] = wanted

    def _compare_layer(self, layer: int) -> None:
        _, k, v = self._actual[layer]
        _, wanted_k, wanted_v = self._expected[layer]
        for part, got, wanted in zip("KV", _parts(k, v), _parts(wanted_k, wanted_v), strict=False):
            _compare(f"layer {layer} {part}", _words(got).cpu().flatten(0, 1), _words(wanted).flatten(0, 1))


def coarse_values(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """For each whole number a float of four significant bits and a usual exponent, its bits as integers."""
    mixed = (numbers * 2654435761 >> 16) % 192
    values = (8 + mixed % 8) * torch.exp2(mixed // 8 % 12 - 9.0) * (1 - 2 * (mixed // 96))
    return values.to(dtype).view(WORDS[dtype.itemsize])


def _compare(name: str, got: Tensor, wanted: Tensor) -> None:
    if not torch.equal(got, wanted):
        first = (got != wanted).nonzero()[0].tolist()
        raise WrongBytesError(
            f"{name}: at {first} is {got[tuple(first)]}, expected {wanted[tuple(first)]}; "
            f"{int((got != wanted).sum())} of {got.numel()} elements differ"
        )


def _parts(k: Tensor, v: Tensor | None) -> list[Tensor]:
    return [k] if v is None else [k, v]


def _words(view: Tensor) -> Tensor:
    return view.view(WORDS[view.dtype.itemsize])


def _tensors(registered: Any) -> list[Tensor]:
    return [registered] if isinstance(registered, Tensor) else list(registered)


def _memory(t: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def refuse_threads(patch: pytest.MonkeyPatch, kind: str) -> None:
    """Let no thread start whose name has `kind` in it, as where a limit of processes is reached."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if kind in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    patch.setattr(threading.Thread, "start", refuse)


class MemoryTier:
    """A lower tier in a dictionary. `fails` says which layers of which chunks end in ERROR or MISS; while
    `gate` is clear no `get` returns."""

    name = "memory"

    def __init__(self) -> None:
        self.pages: dict[LayerKey, Tensor] = {}
        self.fails: Callable[[LayerKey], Status] = lambda key: Status.OK
        self.gate = threading.Event()
        self.gate.set()
        self.asked: list[LayerKey] = []
        self.closed = False

    def contains(self, keys: Sequence[ChunkKey], deadline_s: float) -> list[bool]:
        return [LayerKey(key, 0) in self.pages for key in keys]

    def get(self, keys: Sequence[LayerKey], pages: Sequence[Tensor], deadline_s: float) -> list[Status]:
        self.asked += keys
        self.gate.wait()
        statuses = [self.fails(key) for key in keys]
        for key, page, status in zip(keys, pages, statuses, strict=True):
            if status is Status.OK:
                page.copy_(self.pages[key])
        return statuses

    def put(self, keys: Sequence[LayerKey], pages: Sequence[Tensor], deadline_s: float) -> list[Status]:
        self.pages |= {key: page.clone() for key, page in zip(keys, pages, strict=True)}
        return [Status.OK] * len(keys)

    def close(self) -> None:
        self.closed = True


def require_rest(engine: CacheEngine) -> None:
    """Nothing is held but what is cached."""
    assert engine.flush()
    stats = engine.stats()
    assert (stats["pins"], stats["writes_in_flight"]) == (0, 0)
    cached = stats["chunks"] * engine.num_layers
    assert stats["pages_in_use"] == cached
    # What a node's memory keeps is its owner's.
    assert stats["page_references"] == (0 if engine.config.host_memory else cached)


@contextmanager
def held_completions(engine: CacheEngine) -> Iterator[None]:
    """Inside, nothing that waits for the end of a transfer makes progress."""
    gate = threading.Event()
    engine._completions.submit(gate.wait)
    try:
        yield
    finally:
        gate.set()


def run_slots(first: int, count: int, backwards: bool = False) -> list[int]:
    slots = list(range(first, first + count))
    return slots[::-1] if backwards else slots
