from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lwkv.errors import ConfigError
from lwkv.integrations.sglang.settings import read_settings
from lwkv.integrations.sglang.versions import check_version


def test_a_chunk_is_a_page_and_layers_come_one_by_one_unless_the_user_says_otherwise() -> None:
    settings = read_settings({"max_local_cpu_size": 2}, 64)
    assert (settings.chunk_size, settings.use_layerwise) == (64, True)
    assert settings.max_local_cpu_size == 2
    assert settings.forgets


def test_pages_stay_raw_unless_the_user_says_otherwise() -> None:
    assert read_settings({}, 64).why_raw_pages == "lossless was not measured in SGLang"


def test_a_file_and_the_environment_are_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lwkv.yaml").write_text("max_local_cpu_size: 3\nload_timeout_s: 7\n")
    monkeypatch.setenv("LWKV_CONFIG_FILE", str(tmp_path / "lwkv.yaml"))
    monkeypatch.setenv("LWKV_MAX_LOCAL_CPU_SIZE", "4")
    config = read_settings({}, 16)
    assert (config.max_local_cpu_size, config.load_timeout_s, config.chunk_size) == (4, 7, 16)


def test_a_flush_can_leave_what_is_cached() -> None:
    assert not read_settings({"on_flush": "keep"}, 16).forgets


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (
            {"chunk_size": 256},
            r"chunk_size=256 \(linker_extra_config\): SGLang's page is 16 tokens.*allowed is 16",
        ),
        ({"use_layerwise": False}, "use_layerwise=False"),
        ({"local_cpu": False, "remote_url": "valkey://localhost:6379"}, "local_cpu=False"),
        ({"save_unfull_chunk": True}, "save_unfull_chunk=True"),
        ({"on_flush": "no"}, "on_flush: got 'no'.*allowed: forget or keep"),
        ({"chunksize": 16}, "chunksize"),
    ],
)
def test_what_cannot_work_is_refused_with_the_value_and_what_is_allowed(
    extra: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        read_settings(extra, 16)


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lwkv.yaml").write_text("chunk_size: 8\nmax_local_disk_size: much\n")
    monkeypatch.setenv("LWKV_CONFIG_FILE", str(tmp_path / "lwkv.yaml"))
    monkeypatch.setenv("LWKV_ENABLE_BLENDING", "true")
    wrong = {
        "on_flush": "never",
        "use_layerwise": False,
        "local_cpu": False,
        "save_unfull_chunk": True,
        "max_local_cpu_size": -1,
        "local_dsk": "/tmp",
    }
    with pytest.raises(ConfigError) as error:
        read_settings(wrong, 16)
    text = str(error.value)
    for name in (*wrong, "chunk_size", "max_local_disk_size", "enable_blending"):
        assert name in text, name
    assert "lwkv.yaml" in text
    assert "LWKV_ENABLE_BLENDING" in text


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23+cpu"])
def test_the_tested_version_is_taken(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.5.23.post1", "0.0.0", ""])
def test_any_other_version_is_refused_by_name(version: str) -> None:
    with pytest.raises(ValueError, match=r"SGLang .*: lwkv works with 0\.5\.23"):
        check_version(version)
