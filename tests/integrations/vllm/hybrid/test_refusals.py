from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lwkv.errors import ConfigError
from lwkv.integrations.vllm.hybrid.refusals import can_have_groups, refuse, require_drafts
from lwkv.integrations.vllm.settings import Settings


def vllm_config(**more: Any) -> Any:
    return SimpleNamespace(**{"parallel_config": SimpleNamespace(pipeline_parallel_size=1)} | more)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"host_memory": "/tmp/none.socket"}, "host_memory: got '/tmp/none.socket'; set it to null"),
        ({"save_unfull_chunk": True}, "save_unfull_chunk: got true; set it to false"),
        ({"enable_blending": True}, "enable_blending: got true; set it to false"),
    ],
)
def test_settings_that_need_one_group_are_named_with_what_to_do(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        refuse(Settings(**settings), vllm_config())
    text = str(error.value)
    assert line in text
    assert "--disable-hybrid-kv-cache-manager" in text


def test_all_that_cannot_be_used_is_told_at_once() -> None:
    wrong = Settings(save_unfull_chunk=True, page_codec="fp8")
    with pytest.raises(ConfigError) as error:
        refuse(wrong, vllm_config(speculative_config=SimpleNamespace(method="mtp")))
    first, *problems, last = str(error.value).splitlines()
    assert "several groups of KV caches" in first
    assert [line.split(":")[0].split(",")[0] for line in problems] == [
        "save_unfull_chunk",
        "page_codec",
        "speculative decoding",
    ]
    assert last.startswith("Change that, or start vLLM with --disable-hybrid-kv-cache-manager")


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"speculative_config": SimpleNamespace(method="mtp")}, "here by 'mtp', was not tried"),
        ({"parallel_config": SimpleNamespace(pipeline_parallel_size=2)}, "pipeline_parallel_size"),
        ({"kv_events_config": SimpleNamespace(enable_kv_cache_events=True)}, "enable_kv_cache_events"),
    ],
)
def test_features_of_vllm_that_were_not_tried_are_named(more: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        refuse(Settings(), vllm_config(**more))


@pytest.mark.parametrize("method", ["ngram", "eagle"])
def test_ways_to_draft_that_were_tried_are_not_refused(method: str) -> None:
    refuse(Settings(), vllm_config(speculative_config=SimpleNamespace(method=method)))


def test_a_draft_model_whose_layers_are_not_known_is_refused() -> None:
    drafts = vllm_config(speculative_config=SimpleNamespace(method="eagle"))
    require_drafts(drafts, ["model.layers.6"])
    require_drafts(vllm_config(), [])
    with pytest.raises(ConfigError, match="'eagle': no layer of the draft model"):
        require_drafts(drafts, [])


def test_speculative_decoding_beside_states_is_refused_with_its_own_reason() -> None:
    drafts = vllm_config(speculative_config=SimpleNamespace(method="ngram"))
    with pytest.raises(ConfigError, match=r"a state for each token that it tries[\s\S]*leave lwkv out"):
        refuse(Settings(), drafts, has_states=True)


def test_models_with_states_are_not_sent_to_one_group() -> None:
    with pytest.raises(ConfigError, match=r"save_unfull_chunk: [\s\S]*leave lwkv out") as error:
        refuse(Settings(save_unfull_chunk=True), vllm_config(), has_states=True)
    assert "--disable-hybrid-kv-cache-manager" not in str(error.value)


def test_what_has_no_effect_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    refuse(Settings(load_when="always"), vllm_config(kv_events_config=None))
    assert not caplog.text
    refuse(Settings(), vllm_config())
    assert "all that is found in host memory is loaded" in caplog.text


@pytest.mark.parametrize(
    ("version", "can"),
    [("0.22.1", False), ("0.31.9", False), ("0.32.0", True), ("1.0.0", True), ("dev", True)],
)
def test_versions_before_0_32_have_one_group(version: str, can: bool) -> None:
    assert can_have_groups(version) is can
