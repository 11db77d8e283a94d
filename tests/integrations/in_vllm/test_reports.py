"""What vLLM's metrics, its log and its events tell of lwkv."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from integrations.in_vllm.rig import CHUNK, prompt, started, with_lwkv

from lwkv.keys import chunk_keys


def test_counts_come_out_as_metrics_of_vllm(llama: Path) -> None:
    with started(llama, enable_prefix_caching=False, **with_lwkv()) as engine:
        for _ in range(2):
            engine.ask([prompt(400, 300)])
        assert engine.metric("vllm:lwkv_tokens_retrieved") == 256
        assert engine.metric("vllm:lwkv_tokens_recomputed") == 0
        assert engine.metric("vllm:lwkv_tokens_stored") == 256
        assert engine.metric("vllm:lwkv_host_capacity_bytes") > engine.metric("vllm:lwkv_host_used_bytes") > 0
        name = "vllm:prompt_tokens_cached_by_source"
        hits = {m.labels["source"]: m.value for m in engine.llm.get_metrics() if m.name == name}
        assert not hits or (hits["host"], hits["external_unspecified"]) == (256, 0)


def test_chunks_that_come_and_go_are_events_with_their_tokens(llama: Path) -> None:
    events = {"enable_kv_cache_events": True, "publisher": "null"}
    with started(llama, enable_prefix_caching=False, kv_events_config=events, **with_lwkv()) as engine:
        ids = prompt(410, 300)
        connector = engine.core.scheduler.connector
        told: list[object] = []
        take = connector.take_events
        connector.take_events = lambda: told.extend(take()) or ()
        engine.ask([ids])
        engine.evict_all()
        engine.ask([prompt(411, 20)])
        stored = [event for event in told if type(event).__name__ == "BlockStored"]
        removed = [event for event in told if type(event).__name__ == "BlockRemoved"]
        keys = chunk_keys(ids, CHUNK, engine.worker.info.namespace)
        assert [event.block_hashes for event in stored] == [[key.hash] for key in keys]
        assert [event.parent_block_hash for event in stored] == [None, *(key.hash for key in keys[:-1])]
        assert [token for event in stored for token in event.token_ids] == ids[:256]
        assert {(event.block_size, event.medium) for event in stored} == {(CHUNK, "CPU")}
        assert {hash for event in removed for hash in event.block_hashes} == {key.hash for key in keys}


def test_the_plugin_makes_the_class_known_without_a_module_path(llama: Path) -> None:
    from lwkv.integrations.vllm.plugin import register

    register()
    register()
    arguments = with_lwkv()
    del arguments["kv_transfer_config"]["kv_connector_module_path"]
    with started(llama, enable_prefix_caching=False, **arguments) as engine:
        for hits in (0, 128):
            engine.ask([prompt(420, 140)])
            assert engine.new_hits() == hits


def test_two_engines_of_a_process_count_on_even_where_both_count_something_new() -> None:
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    from lwkv.integrations.vllm.statistics import LWKVPromMetrics

    def of_an_engine(number: str) -> LWKVPromMetrics:
        unregister_vllm_metrics()  # as vLLM does at its start
        kinds = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
        config = SimpleNamespace(kv_transfer_config=None)
        return LWKVPromMetrics(config, kinds, ["model_name", "engine"], {0: ["model", number]})

    engines = [of_an_engine("0"), of_an_engine("1")]
    for number, engine in enumerate(engines):
        engine.observe({"load_failures": 2 + number})
    for number in range(2):
        labels = {"model_name": "model", "engine": str(number)}
        assert REGISTRY.get_sample_value("vllm:lwkv_load_failures_total", labels) == 2 + number
    unregister_vllm_metrics()
