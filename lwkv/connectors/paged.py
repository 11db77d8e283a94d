"""The PagedMem connector: pages go straight to and from the engine's own blocks."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from lwkv.config import Config
from lwkv.connectors.lane import Lane
from lwkv.connectors.loader import Load, Loader
from lwkv.connectors.plan import Cut, FullRows, Plan, Slice, page_shape
from lwkv.connectors.saver import Save, Saver
from lwkv.connectors.upload import Table, Uploads
from lwkv.errors import ConfigError, LayoutError
from lwkv.kernels import Kernels, choose_kernels
from lwkv.layout import KVSpec, describe_layers
from lwkv.paged_layer import PagedLayer
from lwkv.platforms import Platform, Stream
from lwkv.platforms.protocol import Int64s
from lwkv.pool import HostPool
from lwkv.registered import Registered, number_layers
from lwkv.timeline import Timeline
from lwkv.transfer import Transfer

Registration: TypeAlias = "Mapping[str, Registered] | Sequence[Registered]"

STAGING_ALIGNMENT = 512


class PagedConnector:
    """Moves layers between host pages and the engine's paged cache.

    `register` comes first, then `start`; both are for the engine's start, not for a request.

    Args:
        config: chunk size and staging.
        platform: of the device the caches are on.
        spec: what the engine keeps of a token in a layer.
        layout, opaque_tag: as in `describe_layers`.

    Attributes:
        layers: those that are moved; one whose KV another has too is left out.
        layer_of: the index in `layers` of every entry that was registered, by its name and by its position.
    """

    name = "paged"

    def __init__(
        self,
        config: Config,
        platform: Platform,
        spec: KVSpec,
        layout: str | None = None,
        opaque_tag: str | None = None,
    ) -> None:
        self.platform = platform
        self.layers: Sequence[PagedLayer] = ()
        self.layer_of: Mapping[str | int, int] = {}
        self._config = config
        self._spec = spec
        self._layout = layout
        self._opaque_tag = opaque_tag
        self._lock = threading.Lock()
        self._pool: HostPool | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def num_slots(self) -> int:
        """Slots that every layer has; for after `register`."""
        return min(layer.num_slots for layer in self.layers)

    @property
    def device(self) -> torch.device:
        return self.layers[0].device

    @property
    def page_format(self) -> str:
        """What the bytes of the pages are, layer by layer: part of every key."""
        kinds = [_page_kind(layer) for layer in self.layers]
        return ",".join(f"{kind}*{len(list(same))}" for kind, same in groupby(kinds))

    @property
    def page_bytes(self) -> int:
        """Bytes of the largest layer's page."""
        return max(layer.page_bytes(self._config.chunk_size) for layer in self.layers)

    @property
    def tokens_per_row(self) -> int:
        """Tokens that can only be moved together: 1, or a block where blocks are opaque."""
        return max(layer.tokens_per_row for layer in self.layers)

    def register(self, kvcaches: Registration) -> None:
        """Describe what the engine registers; the same tensors again are fine.

        Raises:
            LayoutError: as `describe_layers`; other memory than before, or the same seen in another way;
                tensors of another device type.
        """
        layers = describe_layers(kvcaches, self._spec, self._layout, self._opaque_tag)
        if layers[0].device.type != self.platform.device_type:
            raise LayoutError(
                f"layer {layers[0].name!r} is on {layers[0].device}, the platform is {self.platform.name!r}: "
                "leave the platform to be detected, or name the one that the caches are on"
            )
        if self.layers and list(map(_memory, layers)) != list(map(_memory, self.layers)):
            raise LayoutError("other KV caches were registered before: make an engine for each set of caches")
        if not self.layers:
            self.layers, self.layer_of = layers, number_layers(kvcaches)

    def start(self, pool: HostPool, timeline: Timeline | None = None) -> None:
        """Take streams and staging memory; `pool` is where pages will be, as large as `page_bytes`.

        Raises:
            ConfigError: the pool of an earlier start is not closed; more staging than the device has memory.
        """
        if self._pool is not None and not self._pool.closed:
            raise ConfigError(
                "this connector belongs to an engine that is not closed: close that first, "
                "or make a connector for each engine"
            )
        timeline = timeline or Timeline(self.platform, self.device, on=False)
        buffers, buffer_bytes = self._config.staging_buffers, self._buffer_bytes()
        self._cut = self._make_cut(buffer_bytes // self.page_bytes)
        self._spare: dict[int, list[Table]] = {}
        self.kernels: Kernels = choose_kernels(self.platform)
        self._load_lane = Lane(self.platform, self.device, buffers, buffer_bytes, filler="copies")
        self._save_lane = Lane(self.platform, self.device, buffers, buffer_bytes, filler="kernels")
        self._loader = Loader(self.platform, self.device, self._load_lane, timeline)
        self._saver = Saver(self.platform, self.device, self._save_lane, self.kernels, timeline)
        self._pool = pool

    def begin_load(self, transfer: Transfer, pages: Int64s | None = None) -> Load:
        """Start a batch of loads into the slots of `transfer`, behind what the current stream holds now.

        Give the pages, int64 (layers, chunks), where all are known: the first copies are then queued at once.
        """
        plan = self._plan(transfer, self._uploads(self._load_lane.kernels))
        with self._lock:
            return self._loader.begin(plan, self.layers, pages)

    def load_layer(self, load: Load, layer: int, pages: Int64s) -> None:
        """Queue one layer: pages are int64 (chunks,), in use until `end_load` has returned."""
        with self._lock:
            self._loader.queue(load, layer, self.layers[layer], pages, self._write)

    def drop_chunks(self, load: Load, kept: npt.NDArray[np.bool_]) -> None:
        """Leave the chunks that are False, bool (chunks,), out of the layers still to be queued."""
        load.plan = self._plan(load.plan.transfer.only(kept), load.plan.uploads)

    def wait_layer(self, load: Load, layer: int) -> None:
        """Make the current stream wait for a layer that has been queued."""
        self._loader.wait(load, layer)

    def leave_load(self, load: Load) -> None:
        """Queue nothing more of a batch: what comes next may write to its blocks.

        That is the work of the stream which was current in the batch's last step, and of the current one.
        Takes no lock: a finalizer may call it on any thread.
        """
        self._loader.leave(load)

    def end_load(self, load: Load) -> None:
        """Block until the host pages of a batch that was left are no longer read."""
        self._loader.end(load)

    def begin_save(self, transfer: Transfer, pages: Int64s) -> Save:
        """Start a batch of saves from the slots of `transfer`, none of which may be NO_SLOT.

        Pages are int64 (layers, chunks), as they will be given layer by layer.
        """
        plan = self._plan(transfer, self._uploads(self._save_lane.kernels))
        plan.know(self.layers, pages)
        return Save(plan)

    def save_layer(self, save: Save, layer: int, pages: Int64s, sync: bool = True) -> None:
        """Queue one layer into pages, int64 (chunks,), behind what the current stream holds if `sync`."""
        with self._lock:
            self._saver.queue(save, layer, self.layers[layer], pages, sync)

    def leave_save(self, save: Save) -> None:
        """Queue nothing more of a batch: what comes next may write to its blocks. As for `leave_load`."""
        self._saver.release_blocks(save)

    def end_save(self, save: Save) -> None:
        """Block until all bytes of a batch that was left are in its host pages."""
        self._saver.end()

    def _buffer_bytes(self) -> int:
        buffers = 2 * self._config.staging_buffers  # for loads and for saves
        size = max(self.page_bytes, self._config.staging_bytes // buffers)
        size = -(-size // STAGING_ALIGNMENT) * STAGING_ALIGNMENT
        _, total = self.platform.mem_info(self.device) or (0, buffers * size)
        if buffers * size > total:
            raise ConfigError(
                f"extra_config.staging_bytes={self._config.staging_bytes}, pages of {self.page_bytes} bytes: "
                f"that is {buffers} staging buffers of {size} bytes, but the device has {total}; "
                "lower staging_bytes, staging_buffers or chunk_size"
            )
        return size

    def _make_cut(self, chunks_per_slice: int) -> Cut:
        chunk_size = self._config.chunk_size
        shapes = {page_shape(layer, chunk_size) for layer in self.layers}
        full_rows = {shape: FullRows.of(shape, chunks_per_slice, self.device) for shape in shapes}
        return Cut(chunk_size, chunks_per_slice, full_rows)

    def _uploads(self, stream: Stream) -> Uploads:
        return Uploads(self.platform, self.device, stream, self._spare)

    def _plan(self, transfer: Transfer, uploads: Uploads) -> Plan:
        assert self._pool is not None, "start comes before a transfer"
        return Plan(transfer, uploads, self._pool, self._cut)

    def _write(self, target: PagedLayer, staging: torch.Tensor, part: Slice) -> None:
        self.kernels.scatter(target, staging, part.rows)


def _page_kind(layer: PagedLayer) -> str:
    dtype = str(layer.dtype).removeprefix("torch.")
    return f"{layer.page_format}:{dtype}:{layer.parts}x{layer.row_bytes}"


def _memory(layer: PagedLayer) -> object:
    """Equal for layers that are the same elements at the same addresses."""
    views = [layer.k] if layer.v is None else [layer.k, layer.v]
    return layer.dtype, [(view.data_ptr(), view.shape, view.stride()) for view in views]
