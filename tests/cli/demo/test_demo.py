from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from demo_model import needs_smollm2, write_model

from lwkv.cli.demo import loads, model_file, progress
from lwkv.cli.demo.play import num_shared
from lwkv.cli.main import main
from lwkv.engine import CacheEngine
from lwkv.kernels import choose_kernels
from lwkv.platforms import Platform
from lwkv.reference import (
    QUESTIONS,
    Prompt,
    document_prompt,
)
from lwkv.reference.model_files.smollm2 import INSTALL
from lwkv.steps import LayerSteps

FILES = ["cold.png", "cold.trace.json", "warm.png", "warm.trace.json"]
Demo = Callable[..., int]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = " ".join(document_prompt(question) for question in QUESTIONS)
    return write_model(tmp_path_factory.mktemp("demo") / "tiny.model-0.1", text)


@pytest.fixture
def demo(model: Path, platform: Platform, tmp_path: Path) -> Demo:
    """Runs `lwkv demo` on the tiny model; further arguments win."""

    def run(*arguments: object) -> int:
        fixed = ["--platform", platform.name, "--model", model, "--repeats", 2, "--output", tmp_path / "out"]
        return main(["demo", *(str(argument) for argument in (*fixed, *arguments))])

    return run


def spans_of(trace: Path) -> dict[str, list[int]]:
    """The layers of a trace's spans, by lane, in the order of their start."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    events.sort(key=lambda event: event["ts"])
    lanes: dict[str, list[int]] = {}
    for event in events:
        assert event["dur"] >= 0
        lanes.setdefault(event["cat"], []).append(event["args"]["layer"])
    return lanes


def test_json_tells_that_cached_tokens_were_served_and_answers_are_equal(
    demo: Demo, platform: Platform, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo("--json", "--dtype", "float32") == 0
    shown, errors = capsys.readouterr()
    found = json.loads(shown)
    assert errors == ""
    assert found["faults"] == []
    assert found["setting"]["platform"] == platform.name
    assert found["setting"]["why"] == "it was asked for with --platform"
    assert (found["setting"]["model"], found["setting"]["dtype"]) == ("tiny.model-0.1", "float32")
    first, second = found["answers"]
    assert [first["question"], second["question"]] == list(QUESTIONS)
    assert first["tokens"] == first["recomputed_tokens"]
    assert second["tokens"] == second["recomputed_tokens"]
    assert found["num_hit"] == found["num_retrieved"] == second["num_loaded"] == 768
    assert found["num_stored"] == 768
    assert (first["num_loaded"], first["num_computed"]) == (0, first["num_prompt"])
    assert second["num_computed"] == second["num_prompt"] - 768
    assert found["logit_drift"] < found["closest_choice"] / 2
    assert found["spoiled_drift"] > found["logit_drift"]
    for kind in ("cold", "bulk", "layerwise"):
        timing = found[kind]
        assert timing["num_runs"] == 2
        assert 0 < timing["fastest"] <= timing["median"] <= timing["slowest"]
    assert found["bulk"]["load_exposed"] > 0
    assert found["bulk"]["load_hidden"] == pytest.approx(0, abs=1e-5)


def test_pictures_and_traces_show_every_layer_in_each_lane(
    demo: Demo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo("--output", tmp_path / "new" / "folder", "--json") == 0
    files = [Path(file) for file in json.loads(capsys.readouterr().out)["files"]]
    assert sorted(file.name for file in (tmp_path / "new" / "folder").iterdir()) == FILES
    assert files == [tmp_path / "new" / "folder" / name for name in FILES]
    for picture in (files[0], files[2]):
        assert picture.read_bytes().startswith(b"\x89PNG")
    cold, warm = spans_of(files[1]), spans_of(files[3])
    # A layer's compute is two spans, around the wait; the cold prompt takes two forward passes.
    assert cold["compute"] == [0, 0, 1, 1, 2, 2] * 2
    assert warm["compute"] == [0, 0, 1, 1, 2, 2]
    assert (cold.keys(), warm.keys()) == ({"compute", "save"}, {"compute", "load"})
    assert cold["save"] == warm["load"] == [0, 1, 2]


def test_the_report_says_it_in_words(demo: Demo, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo() == 0
    shown = capsys.readouterr().out
    for wanted in (
        *QUESTIONS,
        "it was asked for with --platform",
        "768 of them stored meanwhile",
        "768 served from the cache",
        "cold, stored meanwhile",
        "warm, loaded in bulk",
        "warm, loaded by layers",
        "ms hidden behind compute",
        "answer 2 equals full recompute, token by token",
        "one loaded block changed on purpose",
        *FILES,
    ):
        assert wanted in shown
    assert "Faults" not in shown


def test_the_environments_choice_of_a_platform_is_the_reason_given(
    model: Path,
    platform: Platform,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LWKV_PLATFORM", platform.name)
    assert main(["demo", "--model", str(model), "--output", str(tmp_path), "--repeats", "1"]) == 0
    assert "LWKV_PLATFORM asks for it" in capsys.readouterr().out


def test_loads_that_change_a_layer_are_reported_and_end_with_1(
    demo: Demo, platform: Platform, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels = type(choose_kernels(platform))
    scatter = kernels.scatter

    def corrupting(self: Any, layer: Any, *arguments: Any) -> None:
        scatter(self, layer, *arguments)
        layer.k.zero_()

    monkeypatch.setattr(kernels, "scatter", corrupting)
    assert demo() == 1
    shown = capsys.readouterr().out
    assert "answer 1 equals full recompute" in shown
    assert "answer 2 DIFFERS from full recompute" in shown
    assert "second question, loaded by layers: the tokens are [" in shown
    assert "second question, loaded in bulk: the tokens are [" in shown
    assert "second question, loaded in bulk: the first token was" in shown


def test_a_load_that_does_nothing_gives_valid_json_and_1(
    demo: Demo, platform: Platform, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(type(choose_kernels(platform)), "scatter", lambda *_: None)
    assert demo("--json") == 1
    shown = capsys.readouterr().out
    assert "NaN" not in shown
    found = json.loads(shown)
    assert found["logit_drift"] is None
    assert found["answers"][1]["tokens"] != found["answers"][1]["recomputed_tokens"]
    assert demo() == 1
    assert "logits with loaded KV are not numbers" in capsys.readouterr().out


def test_a_cache_that_serves_nothing_is_no_demonstration(
    demo: Demo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CacheEngine, "lookup", lambda self, tokens, salts=(): 0)
    assert demo() == 1
    assert "0 tokens were found in the cache" in capsys.readouterr().out


def test_logits_that_do_not_rest_on_the_loaded_blocks_are_a_fault(
    demo: Demo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loads.SpoiledLoads, "wait_for_layer_load", LayerSteps.wait_for_layer_load)
    assert demo() == 1
    shown = capsys.readouterr().out
    assert "one loaded block changed on purpose: the same answer, logits differ by up to 0" in shown
    assert "do not depend on what was loaded" in shown


def test_a_missing_model_package_is_one_line_with_what_to_install(
    demo: Demo,
    platform: Platform,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(model_file, "find_smollm2", lambda: None)
    assert main(["demo", "--platform", platform.name, "--output", str(tmp_path)]) == 2
    assert capsys.readouterr() == ("", f"lwkv: SmolLM2 is not installed: {INSTALL}\n")


@pytest.mark.parametrize(
    ("package", "purpose"),
    [("matplotlib", "drawing a timeline"), ("tokenizers", "turning text into tokens")],
)
def test_a_missing_package_is_one_line_with_what_to_install(
    package: str,
    purpose: str,
    demo: Demo,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert demo() == 2
    wanted = f"lwkv: {purpose} needs the package '{package}': pip install {package}\n"
    assert capsys.readouterr() == ("", wanted)


def test_without_safetensors_the_line_says_so(
    demo: Demo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert demo() == 2
    assert "needs the package 'safetensors': pip install safetensors\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--platform", "hpu"], "got platform 'hpu' (argument), which lwkv does not support"),
        (["--platform", "tpu9"], "unknown platform 'tpu9' (argument); known are"),
        (["--model", "/no/such/model"], "no model at /no/such/model: give a GGUF file or a Hugging Face"),
        (["--output", "{file}/out"], "cannot write to {file}/out: Not a directory; choose a folder with"),
        (["--output", "{file}"], "cannot write to {file}: File exists; choose a folder with --output"),
        (["--model", "{file}"], "{file} cannot be read as a model, it may be broken: "),
        (["--model", "{folder}"], "no config.json in {folder}"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_user_got_wrong_is_one_line_and_exit_code_2(
    arguments: list[str], wanted: str, demo: Demo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"file": tmp_path / "a file", "folder": tmp_path}
    names["file"].write_text("no model")
    assert demo(*(argument.format(**names) for argument in arguments)) == 2
    shown, error = capsys.readouterr()
    assert shown == ""
    assert error.startswith("lwkv: " + wanted.format(**names))
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_broken_file_of_a_model_is_named(
    name: str, model: Path, demo: Demo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in model.iterdir():
        content = file.read_bytes()
        (folder / file.name).write_bytes(content[: len(content) // 2] if file.name == name else content)
    assert demo("--model", folder) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"lwkv: {folder} cannot be read as a model, it may be broken: ")
    assert error.count("\n") == 1


def test_a_tokenizer_with_too_few_tokens_is_refused(
    demo: Demo, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "few"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(model / name)
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    backend.save(str(folder / "tokenizer.json"))
    assert demo("--model", folder) == 2
    assert "makes fewer than 256 tokens of the document" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-1", "two"])
def test_a_wrong_number_of_repeats_is_wrong_usage(
    value: str, demo: Demo, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        demo(f"--repeats={value}")
    assert exit_.value.code == 2
    assert f"'{value}' is no whole number of 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize("interrupted", ["wait_for_layer_load", "save_kv_layer", "wait_for_save"])
def test_an_interrupt_in_a_forward_pass_gives_everything_back(
    interrupted: str,
    demo: Demo,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engines: list[CacheEngine] = []
    close, hook = CacheEngine.close, getattr(LayerSteps, interrupted)

    def closing(self: CacheEngine, timeout_s: float = 30.0) -> None:
        close(self, timeout_s)
        engines.append(self)

    def interrupting(self: LayerSteps, *layer: int) -> Any:
        hook(self, *layer)
        if layer in ((), (1,)):
            raise KeyboardInterrupt

    monkeypatch.setattr(CacheEngine, "close", closing)
    monkeypatch.setattr(LayerSteps, interrupted, interrupting)
    threads = torch.get_num_threads()
    assert demo() == 130
    (engine,) = engines
    held = engine.stats()
    assert (held["pins"], held["writes_in_flight"], held["pages_in_use"]) == (0, 0, 0)
    assert torch.get_num_threads() == threads
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_progress_bars(
    demo: Demo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert demo("--json") == 0
    json.loads(capsys.readouterr().out)
    for wanted in ("Loading tiny.model-0.1", "no cache", "Question 1, cold", "Question 2, warm", "0% |"):
        assert wanted in terminal.getvalue()


def test_progress_is_silent_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    with progress.progress_bar("nothing", 3) as tick:
        tick(3)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize(("first", "second", "shared"), [(700, 600, 512), (255, 900, 0), (256, 256, 256)])
def test_what_prompts_share_counts_in_whole_chunks(first: int, second: int, shared: int) -> None:
    prompts = [Prompt([*range(first), -1]), Prompt([*range(second), -2])]
    assert num_shared(prompts) == shared


@needs_smollm2
@pytest.mark.slow
def test_smollm2_answers_from_its_loaded_document(
    platform: Platform, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--platform", platform.name, "--output", str(tmp_path), "--repeats", "1", "--json"]
    assert main(["demo", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    for answer, words in zip(found["answers"], QUESTIONS.values(), strict=True):
        assert words in answer["answer"]
    assert found["num_hit"] == found["num_retrieved"] == 1024
    assert "doctor" not in found["spoiled_answer"]
    # Not how much, which depends on the machine, but that loads and compute are under way together.
    assert found["layerwise"]["load_hidden"] > 0
    assert found["bulk"]["load_hidden"] == pytest.approx(0, abs=1e-5)
    assert sorted(file.name for file in tmp_path.iterdir()) == FILES
