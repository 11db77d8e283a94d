"""Models of which some layers keep a state: requests that lose their blocks, little memory, other models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm
from integrations.in_vllm import models
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import assert_same, prompt, started, with_lwkv

from lwkv.errors import ConfigError
from lwkv.integrations.vllm.hybrid.refusals import can_have_groups

pytestmark = pytest.mark.skipif(
    not can_have_groups(vllm.__version__), reason="before 0.32, vLLM cannot load states"
)


@pytest.fixture(scope="module")
def computed(lfm2: Path) -> Iterator[Elsewhere]:
    engine = Elsewhere(lfm2, enable_prefix_caching=False)
    yield engine
    engine.close()


def test_requests_that_are_preempted(lfm2: Path, computed: Elsewhere) -> None:
    arguments = {"num_gpu_blocks_override": 42, "max_model_len": 384, "enable_prefix_caching": True}
    with started(lfm2, **arguments, **with_lwkv()) as engine:
        prompts = [prompt(3220 + i, 190 + 20 * i) for i in range(4)]
        for _ in range(2):
            assert_same(engine.ask(prompts, 100), computed.ask(prompts, 100))
            engine.forget()
        assert engine.metric("vllm:num_preemptions") > 0
        assert engine.new_hits() > 0


def test_host_memory_for_less_than_a_prompt(lfm2: Path, computed: Elsewhere) -> None:
    """Two MiB are 128 pages; a prompt of 1500 tokens has 92 of full attention, and states at each 96."""
    arguments = {"max_num_batched_tokens": 100, "max_num_seqs": 4, "enable_prefix_caching": True}
    with started(lfm2, **arguments, **with_lwkv(max_local_cpu_size=0.002)) as engine:
        prompts = [prompt(3240 + i, 700 + 400 * i) for i in range(4)]
        for _ in range(2):
            for ids in prompts:
                assert_same(engine.ask([ids]), computed.ask([ids]))
                engine.forget()
        engine.new_hits()
        for _ in range(2):
            assert_same(engine.ask(prompts[:1]), computed.ask(prompts[:1]))
            engine.forget()
        assert engine.new_hits() >= 672
        stats = engine.worker.engine.stats()
        assert stats["host_used_bytes"] <= stats["host_capacity_bytes"]
        assert (stats["pins"], stats["writes_in_flight"]) == (0, 0)


def test_gated_delta_nets_go_on_as_from_vllm_s_own_cache(tmp_path: Path) -> None:
    """Qwen3-Next in bfloat16: computed, found by vLLM and loaded by lwkv, to the last bit."""
    folder = models.written(models.write_qwen3_next, tmp_path)
    arguments = {"dtype": "bfloat16", "max_model_len": 1024, "enable_prefix_caching": True}
    with started(folder, **arguments, **with_lwkv(chunk_size=256)) as engine:
        ids = prompt(3260, 450)
        # How large vLLM makes a state, and so a block, depends on the processor: 288 or 320 tokens were seen.
        block = engine.llm.llm_engine.vllm_config.cache_config.block_size
        whole = (len(ids) - 1) // block * block
        assert whole > 0
        (computed,) = engine.ask([ids])
        (found,) = engine.ask([ids])
        assert (computed.cached, found.cached, engine.new_hits()) == (0, whole, 0)
        for _ in range(2):
            engine.forget()
            (loaded,) = engine.ask([ids])
            assert engine.new_hits() == loaded.cached == whole
            assert loaded.tokens == found.tokens == computed.tokens
            assert loaded.logprobs == found.logprobs == computed.logprobs


def test_two_ranks_load_what_both_have(lfm2: Path) -> None:
    """vLLM's own workers rotate LFM2's heads by the steps of a prompt: both times these are the same ones."""
    ranks = {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}
    engine = Elsewhere(lfm2, {}, enable_prefix_caching=True, **ranks, **with_lwkv())
    try:
        prompts = [prompt(3300, 300), prompt(3301, 200)]
        computed = engine.call("ask", prompts)
        engine.call("forget")
        loaded = engine.call("ask", prompts)
        assert_same(loaded, computed)
        assert [answer.cached for answer in computed + loaded] == [0, 0, 288, 192]
    finally:
        engine.close()


def test_what_one_rank_lacks_the_state_of_goes_on_where_both_have_all_kinds(lfm2: Path) -> None:
    """Of 300 and 200 tokens rank 0 has the states after 96, 192, 288 and 96, 192; rank 1 none behind 192."""
    settings = with_lwkv()
    settings["kv_transfer_config"] |= {
        "kv_connector": "WithoutLateStates",
        "kv_connector_module_path": "integrations.in_vllm.unequal_ranks",
    }
    ranks = {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}
    engine = Elsewhere(
        lfm2, {}, enable_prefix_caching=True, max_num_batched_tokens=100, max_num_seqs=4, **ranks, **settings
    )
    try:
        hits = []
        for ids in (prompt(3310, 300), prompt(3311, 200)):
            computed = engine.call("ask", [ids])
            for _ in range(2):
                engine.call("forget")
                loaded = engine.call("ask", [ids])
                assert_same(loaded, computed)
                hits += [loaded[0].cached]
        assert hits == [192, 192, 192, 192]
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"enable_prefix_caching": False}, r"keep states that vLLM does not find again .*--enable-prefix"),
        (with_lwkv(save_unfull_chunk=True), r"(?s)save_unfull_chunk: got .*leave lwkv out"),
    ],
)
def test_what_cannot_be_used_with_states_is_refused_by_name(
    lfm2: Path, arguments: dict[str, Any], text: str
) -> None:
    with (
        pytest.raises(ConfigError, match=text),
        started(lfm2, **{"enable_prefix_caching": True} | with_lwkv() | arguments),
    ):
        pass
