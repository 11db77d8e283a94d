"""The class that SGLang makes, with as much of SGLang as it asks for."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from integrations.sglang.test_pools import mha, mla

import lwkv
from lwkv.engine import CacheEngine
from lwkv.errors import ConfigError
from lwkv.integrations.host_memory import MEMORY_S
from lwkv.integrations.sglang.pools import ALGORITHMS

LINKER = "lwkv.integrations.sglang.linker"
MODULES: dict[str, dict[str, Any]] = {
    "sglang": {},
    "sglang.version": {"__version__": "0.5.23"},
    "sglang.srt": {},
    "sglang.srt.mem_cache": {},
    "sglang.srt.mem_cache.hicache_storage": {"PoolName": SimpleNamespace(KV="kv")},
    "sglang.srt.mem_cache.unified_cache": {},
    "sglang.srt.mem_cache.unified_cache.unified_cache_linker": {"UnifiedCacheLinker": object},
    "prometheus_client": {"REGISTRY": SimpleNamespace(_names_to_collectors={})},
}
FULL = SimpleNamespace(name="FULL")


class Metric:
    """A metric of prometheus_client: its value, whatever its labels."""

    def __init__(self, name: str, text: str, labels: list[str]) -> None:
        self.value = 0
        self.named: dict[str, str] = {}

    def labels(self, **labels: str) -> Metric:
        self.named = labels
        return self

    def inc(self, more: int) -> None:
        self.value += more

    def set(self, value: int) -> None:
        self.value = value


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes a linker over a pool; more arguments are those of `params` or of `server_args`."""
    for name, contents in MODULES.items():
        module = ModuleType(name)
        vars(module).update(contents | {"Counter": Metric, "Gauge": Metric})
        monkeypatch.setitem(sys.modules, name, module)
    for name in (LINKER, "lwkv.integrations.sglang.statistics"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    made: list[Any] = []

    def make(pool: Any = None, version: str = "0.5.23", metrics: bool = False, **params: Any) -> Any:
        monkeypatch.setattr(sys.modules["sglang.version"], "__version__", version)
        arguments = SimpleNamespace(
            model_path="some/model",
            served_model_name="model",
            enable_metrics=metrics,
            speculative_algorithm=params.pop("algorithm", None),
        )
        allocator = SimpleNamespace(get_kvcache=lambda: pool or mha())
        defaults = {
            "token_to_kv_pool_allocator": allocator,
            "page_size": 4,
            "mtp_draft_device_pools": (),
            "sidecar_draft_device_pools": (),
            "tp_cache_group": None,
            "attn_tp_cache_group": None,
            "attn_cp_size": 1,
            "pp_size": 1,
        }
        components = params.pop("components", [FULL])
        settings = params.pop("settings", {"max_local_cpu_size": 0.01})
        linker = importlib.import_module(LINKER).LWKVLinker(
            arguments,
            SimpleNamespace(**defaults | params),
            components=components,
            extra_config=settings,
        )
        made.append(linker)
        return linker

    yield make
    for linker in made:
        linker.close()
    sys.modules.pop(LINKER, None)
    sys.modules.pop("lwkv.integrations.sglang.statistics", None)


def test_no_other_module_of_the_package_imports_sglang() -> None:
    """What drives engines in benchmarks is none of it."""
    package = Path(lwkv.__file__).parent
    importing = re.compile(r"^\s*(import|from) sglang\b", re.MULTILINE)
    found = [
        path.relative_to(package) for path in package.rglob("*.py") if importing.search(path.read_text())
    ]
    assert [str(path) for path in found if path.parts[0] != "benchmarks"] == ["integrations/sglang/linker.py"]


def test_it_has_what_sglang_reads_of_it(make: Callable[..., Any]) -> None:
    linker = make()
    assert list(linker.pools) == ["kv"]
    counter = linker.layer_done_counter
    assert (counter.num_layers, counter.consumer_index) == (3, -1)
    counter.set_consumer(7)
    counter.wait_until(0)
    assert counter.consumer_index == 7


def test_host_memory_is_waited_for_before_requests_come(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(
        CacheEngine, "wait_for_memory", lambda engine, seconds: waited.append(seconds) or True
    )
    make()
    assert waited[-1] == MEMORY_S


def test_drafts_are_waited_for_with_the_last_layer(make: Callable[..., Any]) -> None:
    linker = make(mtp_draft_device_pools=(mha(2),))
    assert linker.layer_done_counter.num_layers == 3
    assert linker.link.engine.num_layers == 5


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"version": "0.5.24"}, "SGLang 0.5.24"),
        ({"pp_size": 2}, "pp_size: got 2"),
        ({"attn_cp_size": 2}, "attn_cp_size: got 2"),
        ({"page_size": 0}, "chunk_size"),
        ({"components": [FULL, SimpleNamespace(name="SWA")]}, "SWA"),
        ({"components": [FULL, SimpleNamespace(name="MAMBA")]}, "MAMBA"),
        (
            {"algorithm": "DFLASH"},
            "speculative_algorithm: got DFLASH; .* EAGLE, EAGLE3, NEXTN, STANDALONE, NGRAM",
        ),
        ({"algorithm": "FROZEN_KV_MTP"}, "speculative_algorithm: got FROZEN_KV_MTP"),
        ({"mtp_draft_device_pools": (SimpleNamespace(),)}, "pool SimpleNamespace is not supported"),
    ],
)
def test_what_cannot_work_is_refused(make: Callable[..., Any], changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make(**changed)


@pytest.mark.parametrize("algorithm", [None, *ALGORITHMS])
def test_drafts_of_these_algorithms_are_moved(make: Callable[..., Any], algorithm: str | None) -> None:
    drafts = () if algorithm in (None, "NGRAM") else (mha(1),)
    linker = make(algorithm=algorithm, sidecar_draft_device_pools=drafts)
    assert linker.link.engine.num_layers == 3 + len(drafts)


def test_ranks_have_the_same_names_after_a_flush(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank's is sent to the others, by way of SGLang's group of them."""
    linker, sent = importlib.import_module(LINKER), list[str]()

    def broadcast(names: list[str], source: int, group: str) -> None:
        assert (source, group) == (6, "everybody")
        sent.append(names[0])
        names[0] = sent[0]

    monkeypatch.setattr(torch.distributed, "get_global_rank", lambda group, rank: {0: 6}[rank], raising=False)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast, raising=False)
    made = []
    for rank in range(2):
        monkeypatch.setattr(linker, "_rank", lambda params, rank=rank: (linker.Rank(rank, 2), 2))
        made.append(make(mla(), tp_cache_group="everybody"))
    assert len(set(sent)) == 2
    for each in made:
        each.reset()
    first, second = ({each.link.namespace.split(".", 1)[1] for each in made} for _ in range(2))
    assert first == second
    assert len(first) == 1
    made[0].reset()
    assert made[0].link.namespace.split(".", 1)[1] not in first


def test_calls_go_on_to_the_link(make: Callable[..., Any]) -> None:
    linker = make()
    pages = SimpleNamespace(keys=["ab" * 32], device_indices=torch.arange(4))
    assert linker.lookup("r", [pages]) == []
    assert linker.offload([pages], session_id="s")
    linker.num_completed_offloads()
    assert linker.link.wait_idle(10)
    assert linker.num_completed_offloads() == 1
    assert linker.pop_completed_offload()
    assert linker.lookup("r", [pages]) == [1]
    assert linker.load("r", [pages])
    index = linker.start_layer_wise_loading()
    linker.layer_done_counter.set_consumer(index)
    for layer in range(3):
        linker.layer_done_counter.wait_until(layer)
    assert linker.finish_layer_wise_loading(index)
    assert not linker.cancel_queued_load("r")
    linker.reset()
    assert linker.lookup("r", [pages]) == []


def test_counts_and_gauges_are_published(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    linker = make(metrics=True)
    statistics = linker._statistics
    now = [statistics._next]
    monkeypatch.setattr(statistics, "_clock", lambda: now[0])
    pages = SimpleNamespace(keys=["ab" * 32], device_indices=torch.arange(4))
    linker.offload([pages])
    for _ in range(2):
        linker.num_completed_offloads()
        assert linker.link.wait_idle(10)
        now[0] += 1
    linker.num_completed_offloads()
    assert statistics._metrics["chunks"].value == 1
    assert statistics._metrics["chunks"].named == {"model_name": "model", "tp_rank": "0"}
    assert statistics._metrics["pages_in_use"].value == 3
