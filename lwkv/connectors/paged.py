"""The PagedMem connector: pages go straight to and from the engine's own blocks."""

from __future__ import annotations

from functools import partial

import torch

from lwkv.connectors.lane import Lane
from lwkv.connectors.loader import Load, Loader
from lwkv.connectors.row_tables import RowTables, Table
from lwkv.connectors.saver import Save, Saver
from lwkv.connectors.transfer_plan import FIRST_LAYERS, Plan, SliceShape
from lwkv.errors import ConfigError
from lwkv.kernels import Rows, StagedLayers, choose_kernels
from lwkv.platforms import Int64s
from lwkv.pool.host_pool import HostPool
from lwkv.telemetry.timeline import Timeline
from lwkv.transfer import Transfer

STAGING_ALIGNMENT = 512
MOST_COPIES = 128
STAGING_SHARE, LEAST_STAGING, MOST_STAGING = 256, 128 << 20, 256 << 20


class PagedConnector(Loader, Saver):
    """Moves layers between host pages and the engine's paged cache.

    `register` comes first, then `start`; both are for the engine's start, not for a request. One thread at a
    time; only `leave_load`, `leave_save`, `end_load` and `end_save` may come from another one meanwhile.
    """

    name = "paged"
    _running = False

    def start(self, pool: HostPool, timeline: Timeline | None = None) -> None:
        """Take streams and staging memory, and compile the kernels, which takes a second or two.

        `pool` is where pages will be, as large as `page_bytes`.

        Raises:
            ConfigError: it was started and not stopped; more staging than the device has memory.
        """
        if self._running:
            raise ConfigError(
                "this connector belongs to an engine that is not closed: close that first, "
                "or make a connector for each engine"
            )
        buffers, buffer_bytes = self._config.staging_buffers, self._buffer_bytes()
        self._slice_shape = SliceShape(self.layers, self._config.chunk_size, buffer_bytes // self.page_bytes)
        self._spare: dict[int, list[Table]] = {}
        self.kernels = choose_kernels(self.platform)
        self._load_lane = Lane(self.platform, self.device, self.kernels, buffers, buffer_bytes, loads=True)
        self._save_lane = Lane(self.platform, self.device, self.kernels, buffers, buffer_bytes, loads=False)
        self._timeline = timeline or Timeline(self.platform, self.device, on=False)
        self._pool = pool
        self._compile()
        self._running = True

    def stop(self) -> None:
        """Block until all that is queued is done, and give staging, streams and tables back.

        Nothing can be begun any more. A batch that has not ended keeps what it uses until it has.
        """
        self._running = False
        self._load_lane.finish()
        self._save_lane.finish()
        del self._load_lane, self._save_lane, self._spare, self._slice_shape, self._pool

    def begin_load(self, transfer: Transfer, pages: Int64s | None = None) -> Load:
        """Start a batch of loads; nothing is written to the slots of `transfer` before a layer is queued.

        What is written comes behind what the current stream holds when the first layer is queued.

        Give the pages, int64 (layers, chunks), where all are known: the first copies are then queued at once.
        """
        lane = self._load_lane
        load = Load(lane, self._plan(transfer, lane, pages), [None] * self.num_layers)
        if pages is not None:
            self._fetch_first(load, pages)
        return load

    def begin_save(self, transfer: Transfer, pages: Int64s, sync: bool = True) -> Save:
        """Start a batch of saves from the slots of `transfer`, none of which may be NO_SLOT.

        Args:
            pages: int64 (layers, chunks).
            sync: save behind what the current stream holds when a layer is given.
        """
        lane = self._save_lane
        together = self._config.group_bytes // (self.page_bytes * transfer.num_chunks)
        return Save(lane, self._plan(transfer, lane, pages), pages, max(1, together), sync)

    def layers_ahead(self, load: Load, layer: int, known: bool) -> int:
        """How many layers behind `layer` are queued with it; `known` where all pages are in host memory.

        The first copies are under way when the model is to be launched, which must not be kept waiting. Where
        all are known, more each time: the model's own code makes ours slow, and several in a row take little
        more than one. But a driver whose queue is full makes the host wait.
        """
        if not (known and self._config.lookahead_layers):
            return self._config.lookahead_layers if layer >= FIRST_LAYERS else 0
        return min(1 << 2 * layer, max(8, MOST_COPIES // max(load.plan.num_slices, 1))) - 1

    def _buffer_bytes(self) -> int:
        buffers = 2 * self._config.staging_buffers  # for loads and for saves
        _, total = self.platform.mem_info(self.device) or (0, 0)
        wanted = self._config.staging_bytes
        if wanted is None:
            wanted = min(max(total // STAGING_SHARE, LEAST_STAGING), MOST_STAGING)
        size = max(self.page_bytes, wanted // buffers)
        size = -(-size // STAGING_ALIGNMENT) * STAGING_ALIGNMENT
        if total and buffers * size > total:
            raise ConfigError(
                f"extra_config.staging_bytes={wanted}, pages of {self.page_bytes} bytes: "
                f"that is {buffers} staging buffers of {size} bytes, but the device has {total}; "
                "lower staging_bytes, staging_buffers or chunk_size"
            )
        return size

    def _compile(self) -> None:
        """Launch every kernel without rows, so that no request finds one that is not compiled."""
        rows, groups = self._no_rows(), [[layer] for layer in self.layers]
        if self._slice_shape.may_share:
            self.kernels.prepare(self.layers)
            groups += [list(self.layers[:2])] * (self.num_layers > 1)
        for lane, scatter in ((self._load_lane, True), (self._save_lane, False)):
            for layers in groups:
                sharing = StagedLayers(layers, lane.buffers[0].memory, 0, rows)
                self.platform.launch(lane.kernels, partial(self.kernels.move_layers, scatter, sharing))

    def _no_rows(self) -> Rows:
        return Rows(*torch.zeros(3, 1, dtype=torch.int64, device=self.device)[:, :0].unbind())

    def _plan(self, transfer: Transfer, lane: Lane, pages: Int64s | None) -> Plan:
        uploads = RowTables(self.platform, self.device, lane.kernels, self._spare)
        return Plan(transfer, uploads, self._pool, self._slice_shape, pages)
