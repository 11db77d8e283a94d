"""The PagedMem connector: pages go straight to and from the engine's own blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from lwkv.codecs import Coder, Coding, PageCodec, PagedCoder, choose_codec
from lwkv.connectors.lane import Lane
from lwkv.connectors.loader import Loader
from lwkv.connectors.paged_loader import PagedLoader
from lwkv.connectors.saver import Saver
from lwkv.connectors.transfer_plan import Plans
from lwkv.errors import ConfigError
from lwkv.kernels import Kernels, Rows, StagedLayers, choose_kernels
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.layouts.registered_caches import Caches
from lwkv.pool.host_pool import HostPool
from lwkv.telemetry.timeline import Timeline
from lwkv.transfer import NO_SLOT

STAGING_ALIGNMENT = 512
STAGING_SHARE, LEAST_STAGING, MOST_STAGING = 256, 128 << 20, 256 << 20
"""Of the device's memory for staging, without half of the buffers for loads, which come on top."""
LEAST_TOGETHER = 4 << 20
"""Bytes of several layers that come together where groups take turns: windows and states often have so few
that the link would wait for the host, which queues a copy, a kernel and four events for each buffer."""


class Lanes(NamedTuple):
    """What layers are moved with, in both directions; `buffer_bytes` of device memory in each buffer."""

    kernels: Kernels
    loads: Lane
    saves: Lane
    buffer_bytes: int


class PagedConnector(Caches):
    """The registered caches, and what moves their layers to and from host pages.

    `register` comes first, then `start`; both are for the engine's start, not for a request. One thread at a
    time may use the loader and the saver; only what leaves and ends batches may come from another meanwhile.

    Attributes:
        codec: what makes pages of the layers; since `register`.
        why_codec: why it is this one, in words that follow its name.
        kernels: since `start`, as is all that follows.
        loader: what brings pages to the caches; until `stop`, as is the saver.
        saver: what takes them from there.
    """

    name = "paged"
    codec: PageCodec
    why_codec: str
    loader: Loader[Any]
    saver: Saver
    _running = False
    _lanes: Lanes | None = None

    def start(self, pool: HostPool, timeline: Timeline | None = None) -> None:
        """Take streams and staging memory, and compile the kernels, which takes a second or two.

        `pool` is where pages will be, as large as `page_bytes`.

        Raises:
            ConfigError: it was started and not stopped; more staging than the device has memory, or less
                than a page for each buffer.
        """
        if self._running:
            raise ConfigError(
                "this connector belongs to an engine that is not closed: close that first, "
                "or make a connector for each engine"
            )
        config = self._config
        self.kernels, loads, saves, buffer_bytes = self._lanes or self._open_lanes()
        chunks_per_slice = buffer_bytes // self.page_bytes
        plans = Plans(self.platform, self.layers, pool, self.codec, config.chunk_size, chunks_per_slice)
        timeline = timeline or Timeline(self.platform, self.device, on=False)
        self.loader = self._new_loader(plans, loads, timeline)
        self.saver = Saver(plans, saves, timeline, config.group_bytes, self.page_bytes)
        self._compile(plans)
        self._running = True

    def stop(self) -> None:
        """Block until all that is queued is done, and give staging, streams and tables back.

        Nothing can be begun any more. A batch that has not ended keeps what it uses until it has.
        """
        self._running = False
        self.loader.lane.finish()
        self.saver.lane.finish()
        self._lanes = None
        del self.loader, self.saver

    @staticmethod
    def share_lanes(connectors: Sequence[PagedConnector]) -> None:
        """Have connectors of raw pages, none of which has started, take turns with one set of lanes.

        Their layers then travel in the order in which they are queued, each way over as much staging as one
        connector has. All belong to one thread. Raises ConfigError as `start`.
        """
        largest = max(connectors, key=lambda connector: connector.page_bytes)
        lanes = largest._open_lanes(most_prefilled=1, least_bytes=LEAST_TOGETHER)
        for connector in connectors:
            connector._lanes = lanes

    def _open_lanes(self, most_prefilled: int | None = None, least_bytes: int = 0) -> Lanes:
        """Streams and staging; `most_prefilled` and `least_bytes` as the Lane's for loads."""
        config, buffer_bytes, kernels = self._config, self._buffer_bytes(), choose_kernels(self.platform)
        raw_bytes = buffer_bytes // self.page_bytes * _raw_page_bytes(self.codec, self.layers)
        lane = partial(Lane, self.platform, self.device, kernels, buffer_bytes=buffer_bytes)
        lane = partial(lane, raw_bytes=raw_bytes)
        loads = lane(
            num_buffers=self._load_buffers(),
            loads=True,
            one_stream=config.load_streams == 1,
            most_prefilled=most_prefilled,
            least_bytes=least_bytes,
        )
        saves = lane(num_buffers=config.staging_buffers, loads=False)
        return Lanes(kernels, loads, saves, buffer_bytes)

    def _new_loader(self, plans: Plans, lane: Lane, timeline: Timeline) -> Loader[Any]:
        return PagedLoader(plans, lane, timeline, self._config.lookahead_layers)

    def page_kind(self, layer: PagedLayer) -> str:
        return self.codec.page_kind(layer)

    def page_bytes_of(self, layer: PagedLayer) -> int:
        return self.codec.page_bytes(layer)

    def _check_layers(self, layers: Sequence[PagedLayer]) -> None:
        """Choose the codec."""
        config = self._config
        self.codec, self.why_codec = choose_codec(
            config.page_codec,
            self.platform,
            layers,
            config.chunk_size,
            against=lambda codec: config.why_raw_pages or self._why_no_room(codec, layers),
        )

    def _why_no_room(self, codec: PageCodec, layers: Sequence[PagedLayer]) -> str | None:
        """Why staging of the configured size has no room for a codec that nobody has asked for."""
        wanted, least = self._config.staging_bytes, self._staged_bytes(codec, layers)
        return f"lossless needs staging_bytes of {least} or more" if wanted and wanted < least else None

    def _coders(self) -> list[Coder]:
        """One for each form of pages; none where pages are raw."""
        coders = {id(coder): coder for coder in map(self.codec.coder, self.layers) if coder is not None}
        return list(coders.values())

    def _staged_bytes(self, codec: PageCodec, layers: Sequence[PagedLayer]) -> int:
        """Device memory that staging takes for one page in each buffer.

        What coded pages are decoded to, or coded from, is staging too.
        """
        pages = max(map(codec.page_bytes, layers))
        return self._num_buffers() * pages + 2 * _raw_page_bytes(codec, layers)

    def _num_buffers(self) -> int:
        """For loads and for saves."""
        return self._load_buffers() + self._config.staging_buffers

    def _load_buffers(self) -> int:
        """Staging buffers for loads: twice as many as for saves, or one where nothing runs beside a copy.

        They are all filled when a load begins, and emptied when the engine has done what it has to do before,
        such as clearing blocks: with few of them the link would have nothing to do meanwhile.
        """
        return 2 * self._config.staging_buffers if self._config.load_streams > 1 else 1

    def _buffer_bytes(self) -> int:
        buffers, per_page = self._num_buffers(), self._staged_bytes(self.codec, self.layers)
        _, total = self.platform.mem_info(self.device) or (0, 0)
        wanted = self._config.staging_bytes
        if wanted is None:
            share = min(max(total // STAGING_SHARE, LEAST_STAGING), MOST_STAGING)
            wanted = share * per_page // (per_page - self._load_buffers() // 2 * self.page_bytes)
        elif 0 < wanted < per_page:
            decoded = f", {_raw_page_bytes(self.codec, self.layers)} decoded" if self.codec.is_coded else ""
            raise ConfigError(
                f"extra_config.staging_bytes: got {wanted}; allowed: null, or {per_page} and more: {buffers} "
                f"buffers of one page each, and a page has {self.page_bytes} bytes{decoded}. "
                "Or lower chunk_size"
            )
        size = max(self.page_bytes, wanted * self.page_bytes // per_page)
        size = -(-size // STAGING_ALIGNMENT) * STAGING_ALIGNMENT
        if total and buffers * size > total:
            raise ConfigError(
                f"extra_config.staging_bytes={wanted}, pages of {self.page_bytes} bytes: "
                f"that is {buffers} staging buffers of {size} bytes, but the device has {total}; "
                "lower staging_bytes, staging_buffers or chunk_size"
            )
        return size

    def _compile(self, plans: Plans) -> None:
        """Launch every kernel, without rows or slots, so that no request finds one that is not compiled.

        Nor one that is compiled and was never launched: to bring that to the device, the driver waits for all
        that the device has to do.
        """
        self._launch_coders(plans.paged_coder)
        rows, groups = self._no_rows(), [[layer] for layer in self.layers]
        if plans.slice_shape.may_share:
            self.kernels.prepare(self.layers)
            groups += [list(self.layers[:2])] * (self.num_layers > 1)
        for lane, scatter in ((self.loader.lane, True), (self.saver.lane, False)):
            for layers in groups:
                staged = StagedLayers(layers, lane.buffers[0].memory, 0, rows)
                self.platform.launch(lane.kernels, partial(self.kernels.move_layers, scatter, staged))

    def _launch_coders(self, paged_coder: PagedCoder | None) -> None:
        """Code a page and decode it, in staging that nobody uses yet."""
        lane, current = self.saver.lane, self.platform.current_stream(self.device)
        memory = lane.buffers[0].memory
        for coder in self._coders():
            lane.encode(memory, Coding(coder, 1, has_gaps=False))
            lane.decode(memory, Coding(coder, 1, has_gaps=False))
        if paged_coder is not None:
            nowhere = torch.full((self._config.chunk_size,), NO_SLOT, dtype=torch.int64, device=self.device)
            self.platform.wait_stream(lane.kernels, current)
            for work in (paged_coder.encode, paged_coder.decode):
                lane.code_in_cache(paged_coder, partial(work, self.layers[:1], nowhere, memory, 1))
        self.platform.synchronize_stream(lane.kernels)

    def _no_rows(self) -> Rows:
        return Rows(*torch.zeros(3, 1, dtype=torch.int64, device=self.device)[:, :0].unbind())


def _raw_page_bytes(codec: PageCodec, layers: Sequence[PagedLayer]) -> int:
    """Bytes of the largest raw page that is decoded or coded; 0 where none is."""
    return max((coder.raw_bytes for coder in map(codec.coder, layers) if coder is not None), default=0)
