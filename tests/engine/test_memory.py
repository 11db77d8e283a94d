"""When an engine has its host memory page-locked."""

from __future__ import annotations

import pytest
from oracle import Dims, Oracle

from lwkv.engine import CacheEngine
from lwkv.platforms import Platform
from lwkv.storage import StorageManager


@pytest.mark.parametrize("lock_memory", [True, False])
def test_memory_is_locked_when_the_engine_is_made_or_when_it_is_waited_for(
    platform: Platform, monkeypatch: pytest.MonkeyPatch, lock_memory: bool
) -> None:
    """While a graph is captured nothing may be locked: who captures later asks for it then."""
    oracle = Oracle(platform, platform.current_device(), "sglang_kv", Dims())
    with oracle.engine() as made:
        config = made.config
    begun: list[StorageManager] = []
    monkeypatch.setattr(StorageManager, "lock_memory", lambda manager: begun.append(manager))
    hints = {"block_size": oracle.dims.block_size, **oracle.form.hints}
    arguments = config, oracle.metadata, oracle.kvcaches, oracle.form.engine, hints, platform
    locks = platform.device_type != "cpu"
    with CacheEngine.create(*arguments, lock_memory=lock_memory) as engine:
        assert len(begun) == (locks and lock_memory)
        assert engine.wait_for_memory(20.0)
        assert len(begun) == locks + (locks and lock_memory)
