"""Makes the pool and the host tier of an engine whose host memory is a node's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from uuid import uuid4

from lwkv.platforms import Platform
from lwkv.pool.host_pool import page_stride
from lwkv.shared_host.client.connecting import connect, wait_for_owner
from lwkv.shared_host.client.keeper import Keeper, Waker
from lwkv.shared_host.client.pool import NodePool
from lwkv.shared_host.client.starting import OwnerStarter
from lwkv.shared_host.client.tier import NodeTier
from lwkv.shared_host.greeting import Hello
from lwkv.shared_host.numa import UNKNOWN
from lwkv.telemetry.counters import Counters

START_S = 10.0
"""Seconds that an engine waits at its start for an owner that starts, too."""

OWN_START_S = 120.0
"""The same for an owner that the engine has started itself."""

GIB_START_S = 2.0
"""Seconds more for each GiB that it takes: a system that has to make huge pages first is slow."""


def open_node_memory(
    path: str,
    platform: Platform,
    page_bytes: int,
    timeout_s: float,
    counters: Counters,
    locks_ahead: bool = False,
    use_device: Callable[[], object] | None = None,
    patience_s: float = START_S,
    start_gib: float = 0.0,
    node: int = UNKNOWN,
) -> tuple[NodePool, NodeTier]:
    """Connect to the owner that listens at `path`. Both end with the pool's `close`.

    Args:
        timeout_s: seconds that a request to the owner may take.
        patience_s: how long there may be none at the start.
        locks_ahead, use_device: see NodePool.
        start_gib: size of an owner that is started where none listens; 0 for none.
        node: the NUMA node whose memory is given first; see `node_of`.

    Raises:
        ConfigError: there is no owner, it cannot serve this engine, or the platform cannot use its memory.
    """
    waker, hello = Waker(), Hello(page_stride(page_bytes), node=node, name=uuid4().hex)
    with ExitStack() as undo:
        starter = OwnerStarter(path, start_gib) if start_gib else None
        if starter is not None:
            undo.callback(starter.close)
            patience_s = OWN_START_S + GIB_START_S * start_gib
        session = wait_for_owner(path, hello, timeout_s, waker, patience_s, starter)
    try:
        pool = NodePool(platform, page_bytes, session, counters, locks_ahead, use_device, hello.name)
    except ValueError:
        session.connection.close()
        raise
    keeper = Keeper(pool, partial(connect, path, hello, timeout_s, waker), waker, counters)
    pool.on_end = keeper.leave
    return pool, NodeTier(pool)
