"""What tests have every rank of an engine with several groups of caches do, each in its own process.

vLLM calls these with its worker, see `Engine.on_ranks`. Those that take a rank do nothing on the others.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from lwkv.keys import ChunkKey
from lwkv.storage.disk.reader import DiskReader

LONG_S = 120.0
goes_on = threading.Event()
goes_on.set()


def flush(_: Any) -> bool:
    """Wait until every tier of the rank has all that was stored."""
    return bool(_half().engine.flush(LONG_S))


def evict_all(_: Any) -> None:
    """Empty the rank's host memory, as others' chunks would push all out."""
    tier = _half().engine._tier
    assert tier.evict(tier.evictable())


def held(_: Any) -> dict[str, int]:
    """What is held for requests: nothing of it at rest."""
    worker = _half()
    stats = worker.engine.stats()
    return {
        "pins": stats["pins"],
        "writes in flight": stats["writes_in_flight"],
        "pages of no chunk": stats["page_references"] - stats["pages_in_use"],
        "promises": len(worker._pins),
        "fetches": len(worker.engine.lower.prefetches._open),
        "loads under way": len(worker._under_way),
    }


def stats(_: Any) -> dict[str, int]:
    """The engine's."""
    return dict(_half().engine.stats())


def keep_back(_: Any, rank: int, form: str) -> None:
    """From now on a rank's lower tiers get no chunk of a kind."""
    if rank == _rank():
        engine = _half().engine
        names = {engine.kind_pages[n].namespace for n, kind in enumerate(engine.kinds) if kind.form == form}
        tiers = engine.lower._lower
        keep = tiers.keep

        def keeps(guards: Any, key: ChunkKey, *rest: Any) -> Any:
            return None if key.namespace in names else keep(guards, key, *rest)

        tiers.keep = keeps


def keep_again(_: Any, rank: int) -> None:
    """End that."""
    if rank == _rank():
        del _half().engine.lower._lower.keep


def lose_at_pin(_: Any, rank: int) -> None:
    """Have all go from a rank's host memory once, after the next look-up and before it pins."""
    if rank == _rank():
        engine = _half().engine
        pin = engine.pin

        def pins(*arguments: Any) -> Any:
            engine.pin = pin
            evict_all(None)
            return pin(*arguments)

        engine.pin = pins


def signal_at_fetch(_: Any, rank: int, process: int, number: int) -> None:
    """Have a rank send a process a signal once, when its next fetch begins."""
    _at_fetch(rank, partial(os.kill, process, number))


def remove_at_fetch(_: Any, rank: int, folder: str) -> None:
    """Have a rank remove a folder once, when its next fetch begins."""
    _at_fetch(rank, partial(shutil.rmtree, folder, ignore_errors=True))


def freeze_disk(_: Any, rank: int) -> None:
    """Have a rank's reads from disk wait."""
    if rank == _rank():
        goes_on.clear()
        read = DiskReader.read_run

        def waits(reader: DiskReader, *arguments: Any) -> Any:
            assert goes_on.wait(LONG_S)
            return read(reader, *arguments)

        DiskReader.read_run = waits


def thaw_disk(_: Any) -> None:
    """Have them go on."""
    goes_on.set()


def _at_fetch(rank: int, work: Callable[[], object]) -> None:
    if rank == _rank():
        lower = _half().engine.lower
        fetch = lower.fetch

        def fetches(*arguments: Any) -> None:
            lower.fetch = fetch
            work()
            fetch(*arguments)

        lower.fetch = fetches


def _half() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker


def _rank() -> int:
    from vllm.distributed.parallel_state import get_tp_group

    return int(get_tp_group().rank_in_group)
