"""A batch of requests on its way from the device to the tiers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from lwkv.connectors.saver import Save
from lwkv.errors import DEVICE_FAILURES
from lwkv.pipeline.context import BatchContext
from lwkv.storage import Write
from lwkv.storage.prefix_order import parents_of
from lwkv.transfer import CheckedRequest, Transfer

log = logging.getLogger(__name__)


class BatchStoring:
    """Requests that are merged into one transfer a layer; `lwkv.pipeline.generators.store_steps` drives it.

    A device that fails, or has no memory, ends the store, of which nothing is kept; it never raises.

    Args:
        sync: wait for the current stream before each layer; False only if another store did for this step.
    """

    def __init__(self, requests: Sequence[CheckedRequest], engine: BatchContext, sync: bool) -> None:
        self.num_layers = engine.connector.num_layers
        self._requests = requests
        self._engine = engine
        self._connector = engine.connector
        self._sync = sync
        self._write: Write | None = None
        self._save: Save | None = None

    def open(self) -> None:
        """Take pages for the new chunks of all requests, in all layers: for the first of them that fit."""
        transfer = Transfer.join([request.saves() for request in self._requests])
        new = np.concatenate([np.zeros(0, bool), *(request.new_chunks() for request in self._requests)])
        prompts = [self._engine.keys_of(request) for request in self._requests]
        keys = [key for prompt in prompts for key in prompt]
        parents = [parent for prompt in prompts for parent in parents_of(prompt)]
        self._write = self._engine.storage.begin_write(keys, parents, np.flatnonzero(new).tolist())
        if self._write is not None:
            self._engine.completions.expect(self)
            new[:] = False
            new[self._write.positions] = True
            moved = transfer if new.all() else transfer.only(new)
            self._save = self._try(self._connector.begin_save, moved, self._write.pages, self._sync)

    def queue(self, layer: int) -> None:
        """Queue the save of `layer`, which the current stream has just been told to compute."""
        if self._save is not None:
            self._try(self._connector.save_layer, self._save, layer)

    def commit(self) -> None:
        """Make the chunks visible once their bytes have arrived."""
        if self._save is not None:
            self._try(self._connector.finish_save, self._save)
        self._close(committed=True)

    def close(self) -> None:
        """Give up what was not committed once nothing is in flight; as for a retrieval."""
        self._close(committed=False)

    def _close(self, committed: bool) -> None:
        write, save, failure = self._write, self._save, None
        self._write = self._save = None
        if write is None:
            return
        if not committed:
            # The next store of these chunks need not wait for the end of this one.
            write.give_up()
        try:
            if save is not None:
                self._connector.leave_save(save)
        except DEVICE_FAILURES as error:
            failure = error
        finally:
            self._engine.completions.submit(partial(self._end, write, save, committed, failure), self)

    def _end(self, write: Write, save: Save | None, committed: bool, failure: BaseException | None) -> None:
        """End the write and give the tables back once the device is past them.

        Raises what fails on the device. Where that is the wait for its end, it may still write to the pages:
        nobody else gets them.
        """
        if save is not None:
            self._connector.end_save(save)
        if committed and failure is None:
            write.commit()
        else:
            write.abort()
        if failure is not None:
            raise failure

    def _try(self, work: Callable[..., Any], *arguments: object) -> Any:
        """What `work` returns; None where the device fails, which ends the store."""
        try:
            return work(*arguments)
        except DEVICE_FAILURES as error:
            self._engine.counters.add("store_failures")
            log.warning("the device cannot save: nothing of this store is kept: %s", repr(error))
            self.close()
            return None
