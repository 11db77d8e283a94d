from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lwkv.benchmarks.measuring.shapes import LLAMA_8B, TINY, mla_of
from lwkv.benchmarks.vllm.child import Answer, Prompt
from lwkv.benchmarks.vllm_ttft import Case, Plan, engine_arguments, faults, table, write_model


class Cache:
    """An engine that remembers prefixes, in the device until it is reset, elsewhere if it has lwkv."""

    def __init__(self, name: str, forgets: bool = False) -> None:
        self.name = name
        self.forgets = forgets
        self.in_gpu: set[int] = set()
        self.elsewhere: set[int] = set()

    def ask(self, prompt: Prompt) -> Answer:
        if prompt.reset:
            self.in_gpu.clear()
        hit = prompt.prefix_seed in self.in_gpu | self.elsewhere
        self.in_gpu.add(prompt.prefix_seed)
        if self.name != "plain" and not self.forgets:
            self.elsewhere.add(prompt.prefix_seed)
        return Answer(1.0 if hit else 10.0, prompt.suffix_seed % 7, prompt.prefix if hit else 0)


def test_every_engine_answers_the_same_prompts_cold_warm_and_in_gpu_memory() -> None:
    cases = Plan([64, 128], 16, 3, rest_s=0).measure([Cache("plain"), Cache("lwkv")])  # type: ignore[list-item]
    assert [(case.engine, case.prefix) for case in cases] == [
        ("plain", 64),
        ("lwkv", 64),
        ("plain", 128),
        ("lwkv", 128),
    ]
    for case in cases:
        assert case.cold_ms == [10.0] * 3
        assert case.warm_ms == [10.0 if case.engine == "plain" else 1.0] * 3
        assert case.in_gpu_ms == [1.0] * 3
    assert faults(cases) == []


def test_no_engine_always_comes_after_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    ask = Cache.ask
    monkeypatch.setattr(Cache, "ask", lambda self, prompt: asked.append(self.name) or ask(self, prompt))
    Plan([64], 16, 1, rest_s=0).measure([Cache("plain"), Cache("lwkv")])  # type: ignore[list-item]
    cold = [tuple(asked[first : first + 2]) for first in range(0, len(asked), 6)]
    assert cold == [("plain", "lwkv"), ("lwkv", "plain"), ("plain", "lwkv")]


def test_tokens_that_did_not_come_from_the_cache_are_a_fault() -> None:
    cases = Plan([64], 16, 1, rest_s=0).measure([Cache("plain"), Cache("lwkv", forgets=True)])  # type: ignore[list-item]
    assert faults(cases)[0] == "lwkv, prefix 64, warm: 0 of 64 tokens came from a cache"


def test_other_first_tokens_than_those_without_a_connector_are_a_fault() -> None:
    cases = [Case("plain", 64, tokens=[1, 2]), Case("lwkv", 64, tokens=[1, 3])]
    assert faults(cases) == ["lwkv, prefix 64: first tokens differ from those of plain"]


def test_the_table_has_medians_and_the_cold_time_over_that_without_a_connector() -> None:
    cases = [
        Case("plain", 64, [100.0, 200.0, 300.0], [100.0] * 3, [9.0] * 3),
        Case("lwkv", 64, [110.0, 202.0, 303.0], [11.0, 12.0, 10.0], [9.0] * 3),
    ]
    assert table(cases).splitlines()[-1] == "| 64 | lwkv | 202.0 | 1.010 | 11.0 | 9.0 |"


def test_a_prompt_is_its_prefix_and_its_suffix_from_their_seeds() -> None:
    one, other = (Prompt(8, 1, 4, seed, True).tokens(100) for seed in (2, 3))
    assert len(one) == 12
    assert one[:8] == other[:8]
    assert one[8:] != other[8:]


def test_engines_differ_in_their_connector_alone(tmp_path: Path) -> None:
    plan = Plan([64], 16, 1)
    plain, lwkv, native = (
        engine_arguments(name, tmp_path, TINY, plan, 2.0) for name in ("plain", "lwkv", "native")
    )
    assert lwkv.pop("kv_transfer_config")["kv_connector"] == "LWKVConnector"
    assert native.pop("kv_offloading_size") == 2.0
    assert plain == lwkv == native
    write_model(tmp_path, TINY, 80)
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == TINY.num_layers


def test_a_model_of_latent_rows_is_written_with_its_sizes_and_ranks_share_an_owner(tmp_path: Path) -> None:
    shape = mla_of(LLAMA_8B)
    write_model(tmp_path, shape, 80)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["kv_lora_rank"] + config["qk_rope_head_dim"] == shape.head_size
    assert config["first_k_dense_replace"] == shape.num_layers
    arguments = engine_arguments("lwkv-node", tmp_path, shape, Plan([64], 16, 1, ranks=2), 2.0, "/a/socket")
    assert arguments["tensor_parallel_size"] == 2
    settings = arguments["kv_transfer_config"]["kv_connector_extra_config"]
    assert settings == {"chunk_size": shape.chunk_size, "host_memory": "/a/socket"}


def test_the_chunks_of_all_prompts_are_counted_once() -> None:
    plan = Plan([64, 128], 16, 1)
    prompts: set[bytes] = set()
    keep: list[Prompt] = []
    engine = SimpleNamespace(name="plain", ask=lambda prompt: keep.append(prompt) or Answer(1.0, 1, 0))
    replace(plan, rest_s=0.0).measure([engine])  # type: ignore[list-item]
    for prompt in keep:
        tokens = prompt.tokens(500)
        prompts.update(str(tokens[:end]).encode() for end in range(16, len(tokens) + 1, 16))
    assert len(prompts) == plan.most_chunks(16)
