"""Whether coded pages in host memory can be decoded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lwkv.codecs.page_codec import Coder, Flags, PageCodec
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.platforms import Int64s
from lwkv.pool.host_pool import HostPool


class PageCheck:
    """Looks at the first bytes of pages of these layers, which no device may be writing to. Thread-safe."""

    def __init__(self, codec: PageCodec, layers: Sequence[PagedLayer], pool: HostPool) -> None:
        self._coders = [codec.coder(layer) for layer in layers]
        self._only = self._coders[0] if len(set(map(id, self._coders))) == 1 else None
        self._pool = pool

    def whole(self, layer: int, pages: Int64s) -> Flags:
        """Which of `pages`, int64 (chunks,), of `layer` can be decoded: bool (chunks,). All, if raw."""
        coder = self._coders[layer]
        if coder is None:
            return np.ones(len(pages), bool)
        return coder.whole(self._pool.heads(pages, coder.head_bytes))

    def fits(self, layers: range, pages: Int64s) -> Flags:
        """Which of `pages`, int64 (layers, chunks), that were coded here could be: bool (layers, chunks).

        Layers of one form are looked at together: at the end of a store, somebody waits for this.
        """
        if self._only is not None:
            return self._fit(self._only, pages)
        found = np.ones(pages.shape, bool)
        coders = [self._coders[layer] for layer in layers]
        for coder in {id(coder): coder for coder in coders if coder is not None}.values():
            rows = [row for row, other in enumerate(coders) if other is coder]
            found[rows] = self._fit(coder, pages[rows])
        return found

    def _fit(self, coder: Coder, pages: Int64s) -> Flags:
        headers = self._pool.heads(pages.ravel(), coder.header_bytes)
        return coder.fits(headers).reshape(pages.shape)
