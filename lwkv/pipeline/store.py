"""A batch of requests on its way from the device to the tiers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np

from lwkv.codecs.page_codec import Flags
from lwkv.connectors.saver import Save
from lwkv.errors import DEVICE_FAILURES
from lwkv.pipeline.context import BatchContext
from lwkv.pipeline.device_failures import DeviceFailuresTo
from lwkv.storage import UnnamedWrite, Write
from lwkv.storage.prefix_order import parents_of
from lwkv.transfer import CheckedRequest, Transfer

log = logging.getLogger(__name__)

UNNAMED_LAYERS = 4
"""How many layers are queued before the keys of a prompt's chunks are made: these travel meanwhile.

In vLLM and SGLang all stores come with their keys: this is for callers who store tokens without a look-up.
On an H200 two coded layers of 8192 tokens travel for 0.95 ms, and keys and claims take about as long.
"""


class BatchStoring:
    """Requests that are merged into one transfer a layer, and the cursor over their layers.

    `advance` goes from layer to layer behind the model, `commit` ends it; `close`, or dropping it, gives it
    up. A device that fails, or has no memory, ends the store, of which nothing is kept; it never raises.

    Where the keys of a new prompt take a while to make, its first layers are queued before, into pages that
    have no names yet.

    Args:
        sync: wait for the current stream before each layer; False only if another store did for this step.

    Attributes:
        next_layer: the layer that is queued next, once it is computed.
    """

    _write: Write | UnnamedWrite | None = None
    _save: Save | None = None
    _kept: Flags | None = None
    """Which of the chunks that are saved are written, bool (chunks,); None for all."""
    _is_open = False
    _then: Callable[[], object] | None = None

    def __init__(self, requests: Sequence[CheckedRequest], context: BatchContext, sync: bool = True) -> None:
        self.num_layers = context.connector.num_layers
        self.next_layer = 0
        self._requests = requests
        self._context = context
        self._saver = context.connector.saver
        self._sync = sync

    def __del__(self) -> None:
        self.close()

    def advance(self, layer: int) -> None:
        """Queue the saves of the layers up to `layer`; the current stream has queued work that writes them.

        The first time, take pages for all layers of the new chunks: for the first of them that fit. Nothing
        is done a second time.
        """
        if not self._is_open:
            self._open()
        if isinstance(self._write, UnnamedWrite):
            self._queue(min(layer, UNNAMED_LAYERS - 1))
            if self.next_layer >= min(UNNAMED_LAYERS, self.num_layers):
                self._name()
        self._queue(layer)

    def commit(self, then: Callable[[], object] | None = None) -> None:
        """Queue what is left, and make the chunks visible once their bytes have arrived.

        `then` is called once they are, or never will be, on the thread on which batches end.
        """
        self._then, is_queued = then, False
        try:
            self.advance(self.num_layers - 1)
            if self._save is not None:
                with DeviceFailuresTo(self._give_up):
                    self._saver.finish_save(self._save)
            is_queued = True
        finally:
            self._close(committed=is_queued)

    def close(self) -> None:
        """Give up what was not committed once nothing is in flight; as for a retrieval."""
        self._close(committed=False)

    def _open(self) -> None:
        self._is_open = True
        transfer = Transfer.join([request.saves() for request in self._requests])
        new = np.concatenate([np.zeros(0, bool), *(request.new_chunks() for request in self._requests)])
        self._new = np.flatnonzero(new)
        self._write = self._begin_unnamed() or self._begin_named(None)
        if isinstance(self._write, Write):
            new[:] = False
            new[self._write.positions] = True
        if self._write is not None:
            self._context.completions.expect(self)
            moved = transfer if new.all() else transfer.only(new)
            with DeviceFailuresTo(self._give_up):
                self._save = self._saver.begin_save(moved, self._write.pages, self._sync)
                self._saver.keep_raw(self._save, self._context.storage.allocate)

    def _begin_unnamed(self) -> UnnamedWrite | None:
        """Pages for one new prompt whose keys take a while to make; None where that is not so."""
        if len(self._requests) != 1 or not len(self._new):
            return None
        first = self._context.first_key_of(self._requests[0])
        return None if first is None else self._context.storage.begin_unnamed_write(first, len(self._new))

    def _begin_named(self, unnamed: UnnamedWrite | None) -> Write | None:
        prompts = [self._context.keys_of(request) for request in self._requests]
        keys = [key for prompt in prompts for key in prompt]
        chains = zip(prompts, self._requests, strict=True)
        parents = [parent for prompt, request in chains for parent in parents_of(prompt, request.parent)]
        return self._context.storage.begin_write(keys, parents, self._new.tolist(), unnamed)

    def _name(self) -> None:
        """Make the keys of what is on its way already, and claim those that nobody else writes."""
        if isinstance(self._write, UnnamedWrite):
            named = self._begin_named(self._write)
            if named is None:
                self.close()
            else:
                self._write, self._kept = named, np.isin(self._new, named.positions)

    def _queue(self, layer: int) -> None:
        layers = range(self.next_layer, layer + 1)
        if layers:
            if self._save is not None:
                with DeviceFailuresTo(self._give_up):
                    self._saver.save_layers(self._save, layers)
            self.next_layer = layers.stop

    def _close(self, committed: bool) -> None:
        write, save, then, failure = self._write, self._save, self._then, None
        self._write = self._save = self._then = None
        if write is None:
            if then is not None:
                self._context.completions.submit(then)
            return
        if not committed:
            # The next store of these chunks need not wait for the end of this one.
            write.give_up()
        try:
            if save is not None:
                self._saver.leave_save(save)
        except DEVICE_FAILURES as error:
            failure = error
        finally:
            end = partial(self._end, write, save, committed, failure)
            # One job for both: to wake a thread is one of the dearest things that are done here.
            self._context.completions.submit(end if then is None else partial(_call_both, end, then), self)

    def _end(
        self, write: Write | UnnamedWrite, save: Save | None, committed: bool, failure: BaseException | None
    ) -> None:
        """End the write and give the tables back once the device is past them.

        Raises what fails on the device. Where that is the wait for its end, it may still write to the pages:
        nobody else gets them.
        """
        is_kept = committed and failure is None
        with ExitStack() as undo:
            undo.callback(write.lose)
            if is_kept and isinstance(write, Write):
                write.prepare()
            if save is not None:
                self._saver.end_save(save)
            undo.pop_all()
        if is_kept and save is not None and isinstance(write, Write):
            self._commit(write, save)
        else:
            write.abort()
        if failure is not None:
            raise failure

    def _commit(self, write: Write, save: Save) -> None:
        """Make those chunks visible whose pages a codec could code."""
        whole, tokens = self._saver.whole_chunks(save), save.plan.transfer.chunk_tokens
        if self._kept is not None:
            whole, tokens = whole[self._kept], tokens[self._kept]
        # First of all: somebody waits for it.
        write.commit(whole)
        counters = self._context.counters
        counters.add("chunks_not_coded", len(whole) - int(np.count_nonzero(whole)))
        counters.add("tokens_stored", int(tokens[whole].sum()))

    def _give_up(self, error: BaseException) -> None:
        self._context.counters.add("store_failures")
        log.warning("the device cannot save: nothing of this store is kept: %s", repr(error))
        self.close()


def _call_both(first: Callable[[], object], second: Callable[[], object]) -> None:
    try:
        first()
    finally:
        second()
