"""What of an engine a batch works with."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from lwkv.background.completion_thread import CompletionThread
from lwkv.config.settings import Config
from lwkv.connectors.paged import PagedConnector
from lwkv.keys import ChunkKey
from lwkv.storage import StorageManager
from lwkv.telemetry.counters import Counters
from lwkv.telemetry.log_throttle import LogThrottle
from lwkv.transfer import CheckedRequest


def _no_key(request: CheckedRequest) -> None:
    """All keys are at hand."""


@dataclass(frozen=True, slots=True)
class BatchContext:
    """One engine's parts for its batches; `keys_of` gives the key of every chunk of a request.

    `first_key_of` gives the key of its first chunk if `keys_of` takes a while, None if it does not.

    The deadline of a layer, `config.load_timeout_s` by `clock`, begins when the tiers are asked for it.
    `throttle` logs what did not arrive.
    """

    config: Config
    keys_of: Callable[[CheckedRequest], list[ChunkKey]]
    storage: StorageManager
    connector: PagedConnector
    completions: CompletionThread
    counters: Counters
    clock: Callable[[], float] = time.monotonic
    first_key_of: Callable[[CheckedRequest], ChunkKey | None] = _no_key
    throttle: LogThrottle = field(default_factory=partial(LogThrottle, logging.getLogger(__name__)))

    def with_keys(self, keys_of: Callable[[CheckedRequest], list[ChunkKey]]) -> BatchContext:
        """The same for batches of other keys, which are at hand."""
        return replace(self, keys_of=keys_of, first_key_of=_no_key)
