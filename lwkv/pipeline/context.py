"""What of an engine a batch works with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from lwkv.background.completion_thread import CompletionThread
from lwkv.config.settings import Config
from lwkv.connectors.paged import PagedConnector
from lwkv.keys import ChunkKey
from lwkv.storage import StorageManager
from lwkv.telemetry.counters import Counters
from lwkv.transfer import CheckedRequest


@dataclass(frozen=True, slots=True)
class BatchContext:
    """One engine's parts for its batches; `keys_of` gives the key of every chunk of a request.

    The deadline of a layer, `config.load_timeout_s` by `clock`, begins when the tiers are asked for it.
    """

    config: Config
    keys_of: Callable[[CheckedRequest], list[ChunkKey]]
    storage: StorageManager
    connector: PagedConnector
    completions: CompletionThread
    counters: Counters
    clock: Callable[[], float] = time.monotonic
