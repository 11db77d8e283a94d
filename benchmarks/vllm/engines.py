"""The vLLM engines that are compared: without a cache, with lwkv, and with others' caches."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from lwkv.benchmarks.measuring.child import Child
from lwkv.benchmarks.measuring.shapes import Shape
from lwkv.benchmarks.throttled.remote import installed_in
from lwkv.benchmarks.vllm.conversations import Conversations, Conversed
from lwkv.benchmarks.vllm.load import Load, Served
from lwkv.benchmarks.vllm_ttft import write_model
from lwkv.errors import ConfigError

HOST_GIB_BELOW = 2.5
"""Host memory of engines whose chunks are nearly all in a lower tier."""
# What each of lwkv's modes sets besides, and whether nearly all is in the tier below host memory.
LWKV_MODES: Mapping[str, tuple[dict[str, Any], bool]] = {
    "lwkv": ({}, False),
    "lwkv-raw": ({"page_codec": "raw"}, False),
    "lwkv-lossless": ({"page_codec": "lossless"}, False),
    "lwkv-bulk": ({"use_layerwise": False}, False),
    "lwkv-disk": ({}, True),
    "lwkv-1000": ({"remote_url": "throttled://1000"}, True),
    "lwkv-100": ({"remote_url": "throttled://100"}, True),
}
MODES = ("plain", "native", "lmcache", *LWKV_MODES)
"""Without a cache, vLLM's own offloading, LMCache, which must be installed, and lwkv: by default, with each
kind of pages, in bulk, and with nearly all on disk or in a store of 1000 or 100 MB/s."""


class Sized(Protocol):
    """What an engine is to be made for."""

    @property
    def eager(self) -> bool: ...

    @property
    def host_gib(self) -> float | None:
        """Host memory for what is cached; None for as much as that needs."""

    @property
    def tokens_cached(self) -> int: ...

    @property
    def tokens_in_gpu(self) -> int: ...

    @property
    def longest(self) -> int: ...


def parse_modes(names: str) -> list[str]:
    """MODES, by comma. Raises ConfigError for one that is none."""
    modes = names.split(",")
    for mode in modes:
        if mode not in MODES:
            raise ConfigError(f"engine {mode!r}; allowed: {', '.join(MODES)}")
    return modes


def engine_arguments(
    mode: str, model: Path, shape: Shape, plan: Sized, folder: Path, at_once: int = 1
) -> dict[str, Any]:
    """vLLM's arguments for one of MODES, of which `at_once` engines share the device."""
    host_gib = plan.host_gib or shape.kv_bytes(plan.tokens_cached) / 2**30 * 1.05 + 1
    arguments: dict[str, Any] = {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "max_model_len": plan.longest + 64,
        "max_num_batched_tokens": 16384,
        "max_num_seqs": 64,
        "kv_cache_memory_bytes": shape.kv_bytes(plan.tokens_in_gpu),
        # So much must be free at the start; how much is used, the line above says.
        "gpu_memory_utilization": 0.5 / at_once,
        "enable_prefix_caching": True,
        "enforce_eager": plan.eager,
        "disable_log_stats": True,
        "block_size": shape.block_size,
    }
    if mode == "native":
        arguments["kv_offloading_size"] = host_gib
    elif mode == "lmcache":
        settings = {"lmcache.local_cpu": True, "lmcache.max_local_cpu_size": host_gib}
        arguments["kv_transfer_config"] = _connector("LMCacheConnectorV1", settings)
    elif mode in LWKV_MODES:
        settings = {"chunk_size": shape.chunk_size, **_lwkv_settings(mode, host_gib, folder)}
        transfer = _connector("LWKVConnector", settings)
        arguments["kv_transfer_config"] = {
            **transfer,
            "kv_connector_module_path": "lwkv.integrations.vllm",
        }
    return arguments


def _connector(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": settings}


def _lwkv_settings(mode: str, host_gib: float, folder: Path) -> dict[str, Any]:
    settings, is_below = LWKV_MODES[mode]
    if mode == "lwkv-disk":
        settings = {"local_disk": str(folder), "max_local_disk_size": host_gib}
    return {"max_local_cpu_size": min(HOST_GIB_BELOW, host_gib) if is_below else host_gib, **settings}


class Engine:
    """A vLLM in a process of its own, and how long it took to start."""

    def __init__(
        self,
        mode: str,
        arguments: dict[str, Any],
        packages: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        begin = time.perf_counter()
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(packages)]))
        self.mode = mode
        own = {"PYTHONPATH": path, **(environment or {})}
        self._child = Child(mode, "lwkv.benchmarks.vllm.load", arguments, own)
        self.start_s = time.perf_counter() - begin

    def serve(self, load: Load) -> Served:
        """Raises RuntimeError where the engine has died."""
        return Served(**self._child.ask(asdict(load)))

    def converse(self, conversations: Conversations) -> Conversed:
        """Raises RuntimeError where the engine has died."""
        found = self._child.ask(asdict(conversations))
        return Conversed(**found | {"turns": [tuple(turn) for turn in found["turns"]]})

    def close(self) -> None:
        self._child.close()


@contextmanager
def started(modes: Sequence[str], shape: Shape, plan: Sized) -> Iterator[list[Engine]]:
    """Engines that start at the same time, and end with the block, their folders with them.

    Raises RuntimeError where one of them does not start.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = folder / "model"
        model.mkdir()
        installed_in(folder)
        write_model(model, shape, plan.longest)

        def start(mode: str) -> Engine:
            disk = folder / f"disk-{mode}"
            disk.mkdir()
            arguments = engine_arguments(mode, model, shape, plan, disk, len(modes))
            engine = Engine(mode, arguments, folder)
            stack.callback(engine.close)
            return engine

        with ThreadPoolExecutor(len(modes)) as threads:
            starting = [threads.submit(start, mode) for mode in modes]
        yield [each.result() for each in starting]
