"""What the doctor says of a model."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lwkv.cli.doctor.model import examine_model
from lwkv.cli.doctor.report import Report, lines
from lwkv.cli.main import main
from lwkv.config.settings import Config

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
        "speculative decoding": "refused beside lwkv in vLLM, where caches are in several groups",
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
    use(monkeypatch, **GEMMA | {"layer_types": ["linear_attention", "full_attention"] * 24})
    report = Report({})
    examine_model(report, Config(), "qwen", 16)
    assert "24 layers" in report.model["linear_attention"]
    assert report.model["speculative decoding"].startswith("refused")
    assert "when the engine starts" in report.model["chunk_size"]
    assert "max_local_cpu_size" not in report.model


@pytest.mark.parametrize(
    ("folder", "block_size", "named"), [("missing", 16, "config.json"), ("x", 0, "got 0")]
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
