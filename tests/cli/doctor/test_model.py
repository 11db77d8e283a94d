"""What the doctor says of a model."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lwkv.cli.doctor.model import examine_model
from lwkv.cli.doctor.model_refusals import LOCAL_GROUPS
from lwkv.cli.doctor.report import Report, lines
from lwkv.cli.main import main
from lwkv.config.settings import Config
from lwkv.errors import ConfigError
from lwkv.integrations.sglang.settings import Settings as SGLangSettings
from lwkv.integrations.vllm.hybrid.refusals import refuse
from lwkv.integrations.vllm.settings import Settings

GEMMA = {
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "hidden_size": 3840,
    "dtype": "bfloat16",
    "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
}


QWEN = GEMMA | {"layer_types": ["linear_attention", "full_attention"] * 24, "linear_key_head_dim": 128}


def use(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    """Have transformers read this, whatever the folder."""

    def read(folder: str, local_files_only: bool) -> SimpleNamespace:
        assert local_files_only, "nothing is downloaded"
        if folder == "missing":
            raise OSError("there is no config.json")
        return SimpleNamespace(get_text_config=lambda: SimpleNamespace(**fields))

    stand_in = SimpleNamespace(AutoConfig=SimpleNamespace(from_pretrained=read))
    monkeypatch.setitem(sys.modules, "transformers", stand_in)


def test_kinds_chunk_size_and_what_fits_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, **GEMMA)
    report = Report({})
    examine_model(report, Config(max_local_cpu_size=20, chunk_size=100), "gemma", 16)
    assert report.faults == []
    assert report.model == {
        "window-1024": "40 layers, blocks of 16 tokens with 128 KiB a layer, 320 KiB a token, at most "
        "320 MiB where a prompt can go on",
        "full": "8 layers, blocks of 16 tokens with 128 KiB a layer, 64 KiB a token, of all tokens",
        "groups of caches": "several in vLLM, as long as --disable-hybrid-kv-cache-manager is not set",
        "speculative decoding": "only ngram and eagle work beside lwkv in vLLM, where caches are in several "
        "groups",
        "chunk_size": "chunks have 96 tokens instead of the configured 100: this model's blocks need a "
        "multiple of 16",
        "max_local_cpu_size": "20 GiB hold a prompt of 322,560 tokens where windows are kept alone, 54,613 "
        "tokens where all layers keep all",
    }
    report.versions["lwkv"] = "1"
    assert "What the model keeps, with all heads in one worker" in [*lines(report)]


def test_a_model_of_one_kind_has_no_windows_to_speak_of(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, **GEMMA | {"layer_types": None, "sliding_window": None})
    report = Report({})
    examine_model(report, Config(max_local_cpu_size=3), "llama", 16)
    assert report.model["max_local_cpu_size"] == "3 GiB hold 8,192 tokens"
    assert report.model["chunk_size"] == "chunks have 256 tokens, as configured"


def test_the_chunk_size_of_a_model_with_states_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, **QWEN)
    report = Report({})
    examine_model(report, Config(), "qwen", 16)
    assert report.faults == []
    assert "--enable-prefix-caching" in report.model["prefix caching"]
    assert "24 layers" in report.model["linear_attention"]
    assert report.model["speculative decoding"].startswith("refused")
    assert "when the engine starts" in report.model["chunk_size"]
    assert "max_local_cpu_size" not in report.model


ONE_GROUP = "--disable-hybrid-kv-cache-manager"
LOCAL = GEMMA | {
    "layer_types": ["chunked_attention", "full_attention"] * 24,
    "attention_chunk_size": 8192,
}


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"host_memory": "/run/lwkv.sock"}, "host_memory: got '/run/lwkv.sock'; set it to null"),
        ({"local_cpu": False, "remote_url": "redis://h"}, "local_cpu: got false; set it to true"),
        ({"save_unfull_chunk": True}, "save_unfull_chunk: got true; set it to false"),
        ({"enable_blending": True, "use_layerwise": True}, "enable_blending: got true; set it to false"),
        ({"page_codec": "fp8"}, "page_codec: got 'fp8'; set it to 'raw' or 'auto'"),
    ],
)
def test_the_doctor_says_what_vllm_s_connector_says(
    settings: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing_else = SimpleNamespace(parallel_config=SimpleNamespace())
    for model, has_states in ((GEMMA, False), (QWEN, True)):
        use(monkeypatch, **model)
        report = Report({})
        examine_model(report, Config(**settings), "model", 16)
        (fault,) = report.faults
        with pytest.raises(ConfigError) as error:
            refuse(Settings(**settings), nothing_else, has_states)
        assert fault.endswith(str(error.value))
        assert line in fault
        assert (ONE_GROUP in fault) is not has_states


@pytest.mark.parametrize(("model", "version"), [(GEMMA, "0.22.1"), (LOCAL, "0.32.0")])
def test_settings_that_one_group_takes_are_no_fault_where_vllm_has_one(
    model: dict[str, Any], version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, **model)
    report = Report({"vllm": version})
    examine_model(report, Config(page_codec="fp8"), "model", 16)
    assert report.faults == []
    assert "groups of caches" not in report.model
    monkeypatch.setenv(LOCAL_GROUPS, "1")
    examine_model(report, Config(page_codec="fp8"), "model", 16)
    assert len(report.faults) == (model is LOCAL)


def test_states_that_are_not_cached_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, **GEMMA | {"layer_types": ["mamba", "attention"] * 24})
    report = Report({})
    examine_model(report, Config(), "granite", 16)
    (fault,) = report.faults
    assert "layers of mamba keep states that lwkv does not cache; leave lwkv out" in fault
    use(monkeypatch, **QWEN)
    report = Report({"vllm": "0.22.1"})
    examine_model(report, Config(), "qwen", 16)
    (fault,) = report.faults
    assert "vLLM 0.22.1 does not start a model with states" in fault


def test_with_settings_of_sglang_the_fault_is_sglang_s(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, **GEMMA)
    report = Report({})
    examine_model(report, SGLangSettings(on_flush="keep"), "gemma", 16)
    (fault,) = report.faults
    assert "layers keep window-1024; in SGLang lwkv moves full attention only" in fault


def test_a_model_that_only_the_engine_can_look_at_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, **GEMMA | {"kv_lora_rank": 512})
    report = Report({})
    examine_model(report, Config(), "deepseek", 16)
    assert report.faults == []
    (advice,) = report.advice
    assert "kv_lora_rank: got 512" in advice


@pytest.mark.parametrize(
    ("folder", "block_size", "named"),
    [("missing", 16, "config.json"), ("x", 0, "got 0"), ("/no/such/folder", 16, "there is no such folder")],
)
def test_what_cannot_be_read_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, folder: str, block_size: int, named: str
) -> None:
    use(monkeypatch, **GEMMA)
    report = Report({})
    examine_model(report, Config(), folder, block_size)
    (fault,) = report.faults
    assert named in fault
    assert report.model == {}


def test_without_transformers_the_command_ends_with_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["doctor", "--platform", "cpu", "--model", str(tmp_path)]) == 1
    assert "transformers" in capsys.readouterr().out
