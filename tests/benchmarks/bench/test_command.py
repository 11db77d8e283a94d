from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lwkv.benchmarks.bench import command
from lwkv.benchmarks.bench.findings import Findings
from lwkv.benchmarks.bench.parts import PARTS, Part
from lwkv.benchmarks.bench.run import Bench
from lwkv.cli import main as cli

SMALL = ("--platform", "cpu", "--prefix", "512", "--suffixes", "5", "--repeats", "1")


def bench(output: Path, *arguments: str) -> int:
    return cli.main(["bench", *SMALL, "--output", str(output), *arguments])


def test_the_json_on_stdout_is_the_one_in_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tmp_path, "--only", "ceilings,kernels", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "result.json").read_text())
    assert list(printed["parts"]) == ["ceilings", "kernels"]
    assert set(printed["part_ms"]) == {"ceilings", "kernels"}
    assert printed["shape"]["dtype"] == "float32"
    assert {"lwkv", "python", "torch"} <= set(printed["versions"])


def test_the_command_in_the_result_measures_the_same_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench(tmp_path, "--only", "kernels,ceilings", "--json")
    told = json.loads(capsys.readouterr().out)["command"]
    assert told == (
        "lwkv bench --platform cpu --shape tiny --prefix 512 --suffixes 5 --repeats 1 "
        f"--only ceilings,kernels --output {tmp_path}"
    )


def test_words_pictures_and_a_trace_come_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(tmp_path, "--only", "moves,timeline") == 0
    names = {"result.json", "prefill.png", "prefill.trace.json", "bars.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    told = capsys.readouterr().out
    assert all(str(tmp_path / name) in told for name in names)
    assert "GB/s do not" in told


def test_the_picture_of_a_prefill_says_why_it_is_not_what_the_bars_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []
    monkeypatch.setattr(command, "draw_timeline", lambda spans, path, title: titles.append(title))
    assert bench(tmp_path, "--only", "timeline") == 0
    (title,) = titles
    assert "one run, recorded and with stores; the medians in bars.png are of runs without these" in title


def test_without_matplotlib_the_figures_come_out_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert bench(tmp_path, "--only", "timeline") == 0
    assert {path.name for path in tmp_path.iterdir()} == {"result.json", "prefill.trace.json"}
    assert "no pictures without matplotlib" in capsys.readouterr().err


@dataclass(frozen=True)
class Wrong(Findings):
    def lines(self, absolute: bool) -> Iterator[str]:
        yield "a figure"

    def faults(self) -> Iterator[str]:
        yield "a byte is wrong"


def test_a_wrong_byte_is_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PARTS", {**PARTS, "kernels": Part("Wrong", lambda bench: Wrong())})
    assert bench(tmp_path, "--only", "kernels") == 1
    assert "a byte is wrong" in capsys.readouterr().out


def test_what_was_found_before_a_part_failed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(bench: Bench) -> Findings:
        raise MemoryError("device is full")

    monkeypatch.setattr(command, "PARTS", {**PARTS, "kernels": Part("Fails", fail)})
    with pytest.raises(MemoryError):
        bench(tmp_path, "--only", "ceilings,kernels")
    assert list(json.loads((tmp_path / "result.json").read_text())["parts"]) == ["ceilings"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ("--shape", "llama"),
            "no shape 'llama'; there are llama-8b, deepseek-v3, deepseek-v2-lite, gemma-3-12b, gpt-oss-20b, "
            "tiny",
        ),
        (("--only", "speed"), "no part 'speed'; there are ceilings, "),
        (("--prefix", "100"), "the prefix is 100 tokens; give a multiple of 512"),
        (("--repeats", "0"), "the repeats are 0"),
        (("--platform", "abacus"), "abacus"),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_code_2(
    arguments: tuple[str, str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tmp_path, *arguments) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_suffixes_that_are_no_numbers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench(tmp_path, "--suffixes", "64,many")
    assert "'64,many' is no list of whole numbers" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_to_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert bench(tmp_path / "file") == 2
    assert "choose a folder with --output" in capsys.readouterr().err
