from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from lwkv.errors import ConfigError
from lwkv.integrations.vllm.settings import check_role, read_settings, set_policy, warn_of_outer_policy
from lwkv.integrations.vllm.versions import NEWEST, OLDEST, check_version

PLACE = "kv_connector_extra_config"


def test_layer_by_layer_is_the_default_and_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_settings({}).use_layerwise
    assert read_settings({"chunk_size": 64}).use_layerwise
    assert not read_settings({"use_layerwise": False}).use_layerwise
    monkeypatch.setenv("LWKV_USE_LAYERWISE", "false")
    assert not read_settings({}).use_layerwise
    assert read_settings({"use_layerwise": True}).use_layerwise


def test_settings_are_lwkv_s_own_and_what_becomes_of_a_failed_load() -> None:
    settings = read_settings({"chunk_size": 64, "on_load_failure": "fail"})
    assert (settings.chunk_size, settings.on_load_failure) == (64, "fail")
    assert read_settings({}).on_load_failure == "recompute"


def test_settings_of_vllm_may_come_from_file_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lwkv.yaml").write_text("on_load_failure: fail\nload_when: always\n")
    monkeypatch.setenv("LWKV_CONFIG_FILE", str(tmp_path / "lwkv.yaml"))
    monkeypatch.setenv("LWKV_LOAD_WHEN", "cheaper")
    monkeypatch.setenv("LWKV_PREFETCH_WAITING", "off")
    settings = read_settings({})
    assert (settings.on_load_failure, settings.load_when) == ("fail", "cheaper")
    assert not settings.prefetch_waiting
    assert read_settings({"on_load_failure": "recompute"}).on_load_failure == "recompute"


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"on_load_failure": "ignore"}, "recompute or fail"),
        ({"load_when": "never"}, "cheaper or always"),
        ({"prefetch_waiting": "perhaps"}, "prefetch_waiting"),
        ({"chunksize": 64}, "chunk_size"),
        ({"enable_blending": True, "use_layerwise": False}, "enable_blending"),
        (
            {"enable_blending": True, "local_cpu": False, "local_disk": "/x"},
            "found in host memory",
        ),
        ({"blend_shared_prefix": 5}, "text, or a list of token ids"),
        ({"save_unfull_chunk": True, "save_decode_cache": True}, "save_unfull_chunk"),
    ],
)
def test_what_cannot_work_is_reported_at_the_start(extra: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_settings(extra)


@pytest.mark.parametrize(
    ("role", "reason"), [("kv_producer", "no other process can load"), ("kv_consumer", "finds nothing")]
)
def test_a_role_that_shares_nothing_is_refused_with_what_to_do(
    role: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        check_role(role, read_settings({}))
    for part in (role, reason, "local_disk", "remote_url", "kv_both"):
        assert part in str(error.value)
    check_role(role, read_settings({"local_disk": str(tmp_path), "max_local_disk_size": 1}))
    check_role(role, read_settings({"remote_url": "valkey://localhost:1"}))


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_blending_needs_what_stores_and_loads(role: str) -> None:
    extra = {"remote_url": "valkey://localhost:1", "enable_blending": True}
    with pytest.raises(ConfigError, match=f"{role}.*enable_blending.*kv_both"):
        check_role(role, read_settings(extra))
    check_role("kv_both", read_settings(extra))


@pytest.mark.parametrize("role", ["kv_both", None])
def test_a_role_that_loads_what_it_stored_needs_no_tier(role: str | None) -> None:
    check_role(role, read_settings({}))


@pytest.mark.parametrize("version", ["0.19.1", "0.9.2", "0.1.0"])
def test_a_vllm_that_is_too_old_is_refused_with_the_range(version: str) -> None:
    with pytest.raises(ConfigError, match=r"0\.20 to 0\.\d+"):
        check_version(version)


@pytest.mark.parametrize("version", [".".join(map(str, OLDEST)) + ".2", ".".join(map(str, NEWEST)) + ".0rc1"])
def test_a_vllm_of_the_range_is_taken_without_a_word(version: str, caplog: pytest.LogCaptureFixture) -> None:
    check_version(version)
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.99.0", "1.0", "dev", "0.1.dev123+g12"])
def test_a_vllm_that_was_not_tested_is_reported(version: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_version(version)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_everything_that_is_wrong_is_reported_at_once_with_the_keys_of_vllm() -> None:
    extra = {"on_load_failure": "ignore", "chunksize": 64, "save_decode_cache": 2}
    extra |= {"enable_blending": True, "use_layerwise": False}
    with pytest.raises(ConfigError) as error:
        read_settings(extra)
    lines = str(error.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        *("chunksize", "save_decode_cache", "on_load_failure"),
        f"enable_blending=True ({PLACE}) and use_layerwise=False ({PLACE})",
    ]
    assert "on_load_failure" in lines[0]
    with pytest.raises(ConfigError, match=r"did you mean on_load_failure\?"):
        read_settings({"on_load_failures": "fail"})


@pytest.mark.parametrize(
    ("outer", "policy", "warns"),
    [
        ("MultiConnector", "fail", True),
        ("MultiConnector", "recompute", False),
        ("LWKVConnector", "fail", False),
    ],
)
def test_a_policy_that_an_outer_connector_has_is_warned_of(
    outer: str, policy: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    own = SimpleNamespace(kv_connector="LWKVConnector", kv_load_failure_policy="fail")
    around = SimpleNamespace(kv_connector=outer, kv_load_failure_policy=policy)
    warn_of_outer_policy(around, own, read_settings({}))
    warn_of_outer_policy(None, own, read_settings({}))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warns
    assert all('"kv_load_failure_policy": "recompute"' in line.getMessage() for line in caplog.records)


@pytest.mark.parametrize(("policy", "wanted"), [("fail", "recompute"), ("recompute", "fail")])
def test_vllm_is_given_the_policy_that_is_set_and_a_change_is_logged(
    policy: str, wanted: str, caplog: pytest.LogCaptureFixture
) -> None:
    transfer = SimpleNamespace(kv_load_failure_policy=policy)
    settings = read_settings({"on_load_failure": wanted})
    with caplog.at_level(logging.INFO, "lwkv"):
        set_policy(transfer, settings)
        set_policy(transfer, settings)
    assert transfer.kv_load_failure_policy == wanted
    (line,) = caplog.messages
    assert f"kv_load_failure_policy was {policy!r} and is {wanted!r} now" in line


@pytest.mark.parametrize("given", [None, "Documents follow.", [], [5, 6]])
def test_a_shared_prefix_is_a_text_or_token_ids(given: object) -> None:
    settings = read_settings({"enable_blending": True, "blend_shared_prefix": given})
    found = settings.blend_shared_prefix
    assert found == (tuple(given) if isinstance(given, list) else given)
