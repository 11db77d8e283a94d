from __future__ import annotations

import copy
import json
import pickle
import pydoc
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from config.status import STATUS, USED

from lwkv.config.lmcache import LMCACHE_KEYS
from lwkv.config.messages import allowed_of
from lwkv.config.settings import Config
from lwkv.config.values import ExtraConfig
from lwkv.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs" / "config.md"
FLAGS = [key for key in Config.model_fields if allowed_of(Config, key).kind == "flag"]
NUMBERS = [key for key in Config.model_fields if "number" in allowed_of(Config, key).kind]
WORDS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
# What some flags need beside them.
COMPANY: dict[str, Any] = {
    "local_cpu": {"remote_url": "redis://host:1"},
    "enable_blending": {"use_layerwise": True},
}
LMCACHE_FILE = (Path(__file__).parents[1] / "golden" / "lmcache_blending.yaml").read_text()


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in [*Config.model_fields, "config_file"]:
        monkeypatch.delenv(f"LWKV_{key.upper()}", raising=False)


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "lwkv.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as error:
        make()
    return str(error.value)


# words and numbers from every source


@pytest.mark.parametrize("key", FLAGS)
@pytest.mark.parametrize("word", [*WORDS, "True", "YES", "oFF", " no "])
def test_flags_mean_what_they_say_in_every_source(
    key: str, word: str, monkeypatch: pytest.MonkeyPatch, written: Callable[[str], Path]
) -> None:
    expected, company = WORDS[word.strip().lower()], COMPANY.get(key, {})
    assert getattr(Config(**{key: word}, **company), key) is expected
    assert getattr(Config.load(written(f"{key}: {word}"), **company), key) is expected
    assert getattr(Config.load(written(f"{key}: '{word}'"), **company), key) is expected
    monkeypatch.setenv(f"LWKV_{key.upper()}", word)
    assert getattr(Config.load(**company), key) is expected


@pytest.mark.parametrize("key", FLAGS)
@pytest.mark.parametrize("word", ["", " ", "2", "-1", "1.0", "y", "t", "enabled", "null", "None", "[true]"])
def test_garbage_for_a_flag_is_refused_with_its_variable(
    key: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = f"LWKV_{key.upper()}"
    monkeypatch.setenv(variable, word)
    text = refusal(Config.load)
    assert text.startswith(f"{key}: got ")
    assert f"(environment variable {variable}={word})" in text
    assert "; allowed: true, yes, on, 1, false, no, off or 0" in text


@pytest.mark.parametrize("value", [2, -1, 1.0, 0.0, None, "", "maybe", [], [True], b"true"])
def test_a_flag_takes_no_other_object(value: object) -> None:
    assert "use_layerwise: got" in refusal(lambda: Config(use_layerwise=value))


@pytest.mark.parametrize("value", ["7", True, float("nan"), float("inf"), -1, [[1]], "x", b"7", {}])
@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_is_a_finite_number_in_range_and_no_text(key: str, value: object) -> None:
    assert re.match(rf"{key}: got .* \(argument\); allowed: ", refusal(lambda: Config(**{key: value})))


@pytest.mark.parametrize(
    "text", ["", " ", "true", "x", "nan", ".nan", "inf", ".inf", "-1", "0x10", "1 2", "{", "1,x"]
)
@pytest.mark.parametrize("key", NUMBERS)
def test_text_of_the_environment_that_is_no_such_number_is_refused(
    key: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"LWKV_{key.upper()}", text)
    assert re.match(rf"{key}: got .*LWKV_{key.upper()}={re.escape(text)}\); allowed", refusal(Config.load))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("chunk_size", 0),
        ("chunk_size", 2.0),
        ("chunk_size", 2**63),
        ("max_local_cpu_size", 0),
        ("max_local_cpu_size", 10**400),
        ("load_timeout_s", 0),
        ("load_timeout_s", 86401),
        ("blend_recompute_ratios", 1.01),
        ("blend_recompute_ratios", [0.5, -0.1]),
        ("blend_recompute_ratios", []),
        ("blend_check_layers", []),
        ("blend_check_layers", 0),
        ("blend_check_layers", [0, 1]),
        ("blend_check_layers", [3, 1]),
        ("blend_check_layers", [1, 1]),
        ("blend_check_layers", 1.0),
        ("blend_special_str", ""),
        ("blend_special_str", None),
        ("blend_selector", "magic"),
        ("blend_selector", None),
        ("local_disk", True),
        ("local_disk", " "),
        ("local_disk", "file://"),
        ("local_disk", "s3://bucket"),
        ("write_policy", "write_around"),
        ("write_policy", None),
        ("remote_url", "host:6379"),
        ("remote_url", "redis://"),
        ("remote_url", "redis://a b"),
        ("remote_url", 6379),
        ("extra_config", 3),
        ("extra_config", "slab_bytes"),
    ],
)
def test_values_out_of_range_are_refused_with_key_value_and_origin(key: str, value: object) -> None:
    text = refusal(lambda: Config(**{key: value}))
    assert key in text
    assert "(argument)" in text


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.15", (0.15,)), ("0.15,0.1", (0.15, 0.1)), ("[0.15, 0.1]", (0.15, 0.1)), ("null", None)],
)
def test_lists_are_written_alike_in_file_and_environment(
    text: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LWKV_BLEND_RECOMPUTE_RATIOS", text)
    assert Config.load().blend_recompute_ratios == value


@pytest.mark.parametrize(
    ("text", "gib"), [("8", 8.0), ("0.5", 0.5), ("1e1", 10.0), ("1.5e+1", 15.0), ("010", 10.0), ("+2.", 2.0)]
)
def test_numbers_are_decimal_in_file_and_environment(
    text: str, gib: float, monkeypatch: pytest.MonkeyPatch, written: Callable[[str], Path]
) -> None:
    assert Config.load(written(f"max_local_cpu_size: {text}")).max_local_cpu_size == gib
    monkeypatch.setenv("LWKV_MAX_LOCAL_CPU_SIZE", text)
    assert Config.load().max_host_bytes == gib * 2**30


@pytest.mark.parametrize("text", [" # # ", "# ", "null", "true", "1,2", "<|sep|>", "'"])
def test_text_of_the_environment_is_taken_to_the_letter(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LWKV_BLEND_SPECIAL_STR", text)
    assert Config.load().blend_special_str == text


@pytest.mark.parametrize("value", ["/a/b", "file:///a/b", " /a/b"])
def test_a_disk_folder_may_be_written_as_a_file_url(value: str) -> None:
    assert Config(local_disk=value, max_local_disk_size=1).local_disk == "/a/b"


@pytest.mark.parametrize("value", ["~/a", "file://~/a", Path("~/a")])
def test_a_folder_may_be_below_the_users_home(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert Config(local_disk=value, max_local_disk_size=1).local_disk == "/home/me/a"


def test_an_address_without_a_scheme_is_refused_with_what_is_missing() -> None:
    assert "begins with its scheme, such as redis://" in refusal(lambda: Config(remote_url="cache:6379"))


@pytest.mark.parametrize("off", [None, False, "null", "None", "none", "False", "off", "no"])
def test_disk_and_remote_can_be_switched_off(off: object, written: Callable[[str], Path]) -> None:
    file = written("local_disk: /a\nmax_local_disk_size: 1\nremote_url: redis://h:1")
    config = Config.load(file, local_disk=off, remote_url=off)
    assert (config.local_disk, config.remote_url) == (None, None)


# sources


def test_a_blending_file_of_lmcache_loads_unchanged(written: Callable[[str], Path]) -> None:
    config = Config.load(written(LMCACHE_FILE))
    assert config == Config(
        use_layerwise=True, enable_blending=True, blend_check_layers=1, blend_recompute_ratios=0.15
    )
    assert config.blend_plan == ((1, 0.15),)
    assert config.max_host_bytes == 5 * 2**30


def test_arguments_beat_the_environment_which_beats_the_file_which_beats_the_default(
    monkeypatch: pytest.MonkeyPatch, written: Callable[[str], Path]
) -> None:
    file = written("chunk_size: 1\nprefetch_layers: 1\nblend_min_tokens: 1")
    monkeypatch.setenv("LWKV_CONFIG_FILE", str(file))
    monkeypatch.setenv("LWKV_PREFETCH_LAYERS", "3")
    monkeypatch.setenv("LWKV_BLEND_MIN_TOKENS", "3")
    config = Config.load(blend_min_tokens=5)
    assert (config.chunk_size, config.prefetch_layers, config.blend_min_tokens) == (1, 3, 5)
    assert config.load_timeout_s == 10.0


def test_the_named_file_beats_the_one_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, written: Callable[[str], Path]
) -> None:
    monkeypatch.setenv("LWKV_CONFIG_FILE", "/nowhere")
    assert Config.load(written("chunk_size: 7")).chunk_size == 7


def test_arguments_alone_read_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LWKV_CHUNK_SIZE", "7")
    monkeypatch.setenv("LWKV_NONSENSE", "7")
    monkeypatch.setenv("CHUNK_SIZE", "7")
    assert Config() == Config(chunk_size=256)


def test_every_error_says_where_its_value_came_from(
    monkeypatch: pytest.MonkeyPatch, written: Callable[[str], Path]
) -> None:
    file = written("chunk_size: 0\nlocal_cpu: maybe")
    monkeypatch.setenv("LWKV_PREFETCH_LAYERS", "-3")
    lines = refusal(lambda: Config.load(file, blend_min_tokens=-5)).splitlines()
    assert len(lines) == 4
    assert f"chunk_size: got 0 (file {file}); allowed: a whole number of 1 or more" in lines
    assert any(line.startswith(f"local_cpu: got 'maybe' (file {file})") for line in lines)
    assert any("got -3 (environment variable LWKV_PREFETCH_LAYERS=-3)" in line for line in lines)
    assert any("blend_min_tokens: got -5 (argument)" in line for line in lines)


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_has_the_defaults(text: str, written: Callable[[str], Path]) -> None:
    assert Config.load(written(text)) == Config()


@pytest.mark.parametrize(
    "text", ["- chunk_size", "chunk_size", "chunk_size: [", "a: 1\n---\nb: 1", "chunk_size: 1\nchunk_size: 2"]
)
def test_a_file_that_is_no_mapping_of_settings_is_refused_by_name(
    text: str, written: Callable[[str], Path]
) -> None:
    file = written(text)
    assert f"configuration file {str(file)!r} (argument path)" in refusal(lambda: Config.load(file))


def test_a_file_that_cannot_be_read_is_named_with_who_named_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"local_disk: \xe9")
    for path in (tmp_path, tmp_path / "none.yaml", tmp_path / "latin.yaml"):
        monkeypatch.setenv("LWKV_CONFIG_FILE", str(path))
        assert f"{str(path)!r} (environment variable LWKV_CONFIG_FILE)" in refusal(Config.load)


DEEP = "[" * 3000 + "]" * 3000
BOMB = "a: &a [x, x]\nb: &b [*a, *a]\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("use_layerwise: !!bool maybe", "tags"),
        ("chunk_size: !!int foo", "tags"),
        ("load_timeout_s: !!float foo", "tags"),
        ("chunk_size: !!timestamp foo", "tags"),
        ("chunk_size: !!python/name:os.system x", "tags"),
        ("chunk_size: ! 3", "tags"),
        (f"chunk_size: {DEEP}", "nested deeper than 8"),
        ("? [a]\n: 2", "unhashable key"),
        (BOMB, "aliases"),
        ("extra_config: &a\n  x: *a", "aliases"),
    ],
)
def test_what_no_setting_needs_is_refused_in_a_file(
    text: str, problem: str, written: Callable[[str], Path]
) -> None:
    file = written(text)
    told = refusal(lambda: Config.load(file))
    assert f"configuration file {str(file)!r} (argument path) cannot be read: " in told
    assert problem in told
    assert len(told) < 500


@pytest.mark.parametrize("path", ["a\0b", "\ud800"])
def test_a_path_that_cannot_be_one_is_refused(path: str) -> None:
    assert "(argument path) cannot be read" in refusal(lambda: Config.load(path))


def test_a_long_value_is_shown_in_short(
    monkeypatch: pytest.MonkeyPatch, written: Callable[[str], Path]
) -> None:
    nested: list[object] = []
    for _ in range(5000):
        nested = [nested]
    for value in ("9" * 5000, 10**5000, ["x"] * 5000, nested, {str(i): "y" * 999 for i in range(999)}):
        for key in ("chunk_size", "use_layerwise", "enable_p2p", "extra_config"):
            assert len(refusal(partial(Config, **{key: value}))) < 31 * 400
    monkeypatch.setenv("LWKV_CHUNK_SIZE", "9" * 5000)
    assert len(refusal(Config.load)) < 700
    monkeypatch.delenv("LWKV_CHUNK_SIZE")
    assert len(refusal(lambda: Config.load(written("k" * 5000 + ": 1")))) < 1500


# unknown keys


def test_an_unknown_key_is_reported_with_the_nearest_and_all_known_ones(
    written: Callable[[str], Path],
) -> None:
    file = written("chunck_size: 128\n7: x")
    text = refusal(lambda: Config.load(file))
    assert f"chunck_size: got 128 (file {file}), but there is no such key (did you mean chunk_size?)" in text
    assert f"7: got 'x' (file {file}), but there is no such key; allowed: " in text
    assert all(key in text for key in Config.model_fields)


@pytest.mark.parametrize("key", ["_env_file", "_cli_parse_args", "model_config", "staging_bytes", "self"])
def test_no_argument_is_swallowed(key: str) -> None:
    assert f"{key}: got 'x' (argument), but there is no such key" in refusal(lambda: Config(**{key: "x"}))


@pytest.mark.parametrize("given", ["lwkv.yaml", Path("lwkv.yaml"), {"chunk_size": 16}, {}], ids=repr)
def test_a_file_or_mapping_is_no_setting_and_says_how_to_read_a_file(given: Any) -> None:
    text = refusal(lambda: Config(given))
    assert text.startswith(f"got {given!r} without a name: ")
    assert "to read a file use Config.load(path)" in text


def test_an_unknown_variable_is_reported_with_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LWKV_CHUNKSIZE", "3")
    text = refusal(Config.load)
    assert "environment variable LWKV_CHUNKSIZE='3' names no setting (did you mean LWKV_CHUNK_SIZE?)" in text


def test_variables_for_other_parts_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LWKV_PLATFORM", "LWKV_LOG_LEVEL", "LMCACHE_CHUNK_SIZE", "OTHER_LWKV_X"):
        monkeypatch.setenv(name, "cpu")
    assert Config.load() == Config()


@pytest.mark.parametrize("key", LMCACHE_KEYS)
def test_a_key_of_lmcache_stays_only_where_it_asks_for_the_same(key: str) -> None:
    for same in LMCACHE_KEYS[key].same:
        assert Config(**{key: same}) == Config()
    text = refusal(lambda: Config(**{key: "other"}))
    assert f"{key}: got 'other' (argument), a key of LMCache; allowed: " in text
    assert text.endswith(LMCACHE_KEYS[key].advice)


@pytest.mark.parametrize(
    ("key", "value", "taken"),
    [
        ("cache_policy", "lru", True),
        ("enable_p2p", "off", True),
        ("enable_p2p", 0, True),
        ("enable_p2p", "", False),
        ("enable_p2p", None, False),
        ("min_retrieve_tokens", False, False),
        ("numa_mode", False, True),
        ("numa_mode", True, False),
    ],
)
def test_values_of_lmcaches_keys_are_read_with_the_same_words(key: str, value: object, taken: bool) -> None:
    if taken:
        assert Config(**{key: value}) == Config()
    else:
        assert "a key of LMCache" in refusal(lambda: Config(**{key: value}))


# extra_config


def test_extra_config_is_checked_key_by_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LWKV_EXTRA_CONFIG", "{stage_bytes: 3, slab_bytes: -1, 5: 6}")
    text = refusal(Config.load)
    assert "extra_config.stage_bytes: got 3 (environment" in text
    assert "(did you mean staging_bytes?)" in text
    assert "extra_config.slab_bytes: got -1 (environment" in text
    assert "extra_config.5: got 6" in text


def test_extra_config_that_cannot_be_read_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LWKV_EXTRA_CONFIG", "{staging_bytes: 5, staging_bytes: 6}")
    text = refusal(Config.load)
    assert "environment variable LWKV_EXTRA_CONFIG='{staging_bytes: 5, staging_bytes: 6}'" in text
    assert "gives staging_bytes twice" in text


def test_extra_config_is_read_from_every_source(
    monkeypatch: pytest.MonkeyPatch, written: Callable[[str], Path]
) -> None:
    file = written("extra_config:\n  staging_bytes: 4096\n  staging_buffers: 3\n")
    config = Config.load(file)
    assert (config.staging_bytes, config.staging_buffers, config.slab_bytes) == (4096, 3, 256 << 20)
    monkeypatch.setenv("LWKV_EXTRA_CONFIG", '{"slab_bytes": 8192, "reserve_gib": 0.5}')
    config = Config.load(file)
    assert (config.staging_bytes, config.slab_bytes, config.reserve_bytes) == (None, 8192, 2**29)
    assert Config.load(file, extra_config={"lookahead_layers": 0}).lookahead_layers == 0
    assert Config.load(file, extra_config=None).extra_config == ExtraConfig()


# combinations


BLENDING = {"enable_blending": True, "use_layerwise": True}


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ({"enable_blending": True}, ["enable_blending=True (argument)", "use_layerwise=False (default)"]),
        (
            {"enable_blending": True, "use_layerwise": True, "use_gpu": False},
            ["enable_blending=True (argument)", "use_gpu=False (argument)"],
        ),
        (
            {**BLENDING, "blend_check_layers": [1, 8]},
            [
                "blend_check_layers=(1, 8) (argument)",
                "blend_recompute_ratios=None (default)",
                "2 check layers",
            ],
        ),
        (
            {**BLENDING, "blend_selector": "query", "blend_check_layers": 1},
            ["blend_selector='query' (argument)", "blend_check_layers=(1,) (argument)", "leave blend_check"],
        ),
        (
            {**BLENDING, "blend_check_layers": [1, 8], "blend_recompute_ratios": [0.1, 0.2]},
            ["blend_recompute_ratios=(0.1, 0.2) (argument)", "let ratios descend"],
        ),
        (
            {**BLENDING, "blend_check_layers": [1, 8], "blend_recompute_ratios": [0.3, 0.0]},
            [
                "blend_recompute_ratios=(0.3, 0.0) (argument)",
                "the last ratio is the share of tokens that is computed",
            ],
        ),
        (
            {"use_gpu": False, "extra_config": {"staging_bytes": 1}},
            ["use_gpu=False (argument)", "extra_config.staging_bytes=1 (argument)"],
        ),
        ({"local_disk": "/a"}, ["local_disk='/a' (argument)", "max_local_disk_size=0.0 (default)"]),
        ({"max_local_cpu_size": 1e-12}, ["local_cpu=True (default)", "max_local_cpu_size=1e-12 (argument)"]),
        (
            {"write_policy": "write_back", "local_cpu": False, "remote_url": "redis://h:1"},
            ["write_policy='write_back' (argument)", "local_cpu=False (argument)", "write_through"],
        ),
        ({"local_cpu": False}, ["local_cpu=False (argument)", "local_disk=None", "remote_url=None"]),
        (
            {"extra_config": {"reserve_gib": 6}},
            ["extra_config.reserve_gib=6.0 (argument)", "size=5.0 (default)"],
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], keys: list[str]) -> None:
    text = refusal(lambda: Config(**settings))
    assert all(key in text for key in keys)


def test_without_use_gpu_no_staging_is_asked_for_beyond_what_a_page_needs() -> None:
    assert Config(use_gpu=False, extra_config={"staging_buffers": 3}).staging_bytes == 0
    assert Config().staging_bytes is None


def test_all_contradictions_are_reported_at_once() -> None:
    text = refusal(lambda: Config(enable_blending=True, use_gpu=False, local_disk="/a"))
    assert len(text.splitlines()) == 3


def test_everything_that_is_wrong_is_reported_at_once(
    monkeypatch: pytest.MonkeyPatch, written: Callable[[str], Path]
) -> None:
    file = written(
        "chunk_size: '256'\nchunk_sise: 4\nlocal_cpu: true\nenable_p2p: true\nlocal_cpu: false\n"
        "use_gpu: false\nenable_blending: true\nremote_url: mooncakestore://host:1/\n"
    )
    monkeypatch.setenv("LWKV_COLOR", "red")
    monkeypatch.setenv("LWKV_EXTRA_CONFIG", "{slab_bytes: 0}")
    text = refusal(lambda: Config.load(file, load_timeout_s=-1, write_policy="write_back"))
    for part in (
        *("gives local_cpu twice: in line 3 and again in line 5", "LWKV_COLOR='red' names no setting"),
        *("enable_p2p: got True", "mooncake://", "chunk_sise: got 4", "chunk_size: got '256'"),
        *("extra_config.slab_bytes: got 0", "load_timeout_s: got -1", "enable_blending=True (file"),
        *("use_gpu=False", "write_policy='write_back' (argument) and local_cpu=False"),
    ):
        assert part in text
    assert len(text.splitlines()) == 11


def test_what_a_wrong_value_would_have_meant_is_no_contradiction() -> None:
    text = refusal(lambda: Config(local_disk="/a", max_local_disk_size="9"))
    assert text.splitlines() == [
        "max_local_disk_size: got '9' (argument); allowed: a finite number of GiB from 0 to 1048576; "
        "write the number without quotes"
    ]
    (line,) = refusal(lambda: Config(local_disk="/a", max_local_disk_sise=9)).splitlines()
    assert "(did you mean max_local_disk_size?)" in line


def test_a_file_that_cannot_be_read_does_not_hide_what_else_is_wrong(tmp_path: Path) -> None:
    lines = refusal(lambda: Config.load(tmp_path / "none", chunk_size=0, local_disk="/a")).splitlines()
    assert len(lines) == 2
    assert "cannot be read" in lines[0]
    assert lines[1].startswith("chunk_size: got 0")


def test_quotes_are_spoken_of_only_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "quotes" not in refusal(lambda: Config(chunk_size=0, blend_min_tokens="many"))
    assert "without quotes" in refusal(lambda: Config(extra_config={"slab_bytes": "1e6"}))
    monkeypatch.setenv("LWKV_CHUNK_SIZE", "many")
    assert "quotes" not in refusal(Config.load)


def test_a_configuration_can_be_made_from_what_it_dumps() -> None:
    for config in (Config(use_gpu=False), Config(blend_check_layers=[1, 2], remote_url="redis://a:1")):
        assert Config(**config.model_dump()) == config


def test_every_setting_is_shown_with_secrets_cut() -> None:
    shown = str(Config(remote_url="redis://me:s3cret@host:1/0"))
    assert "remote_url='redis://***@host:1'" in shown
    assert "s3cret" not in shown
    assert all(f"{key}=" in shown for key in Config.model_fields)


def test_the_source_of_every_setting_is_known(
    monkeypatch: pytest.MonkeyPatch, written: Callable[[str], Path]
) -> None:
    file = written("chunk_size: 64\nprefetch_layers: 3\n")
    monkeypatch.setenv("LWKV_PREFETCH_LAYERS", "4")
    monkeypatch.setenv("LWKV_REMOTE_URL", "redis://me:s3cret@host:1")
    sources = Config.sources(file, use_layerwise=True)
    assert list(sources) == list(Config.model_fields)
    assert sources["chunk_size"] == f"file {file}"
    assert sources["prefetch_layers"] == "environment variable LWKV_PREFETCH_LAYERS=4"
    assert sources["remote_url"] == "environment variable LWKV_REMOTE_URL"
    assert (sources["use_layerwise"], sources["local_cpu"]) == ("argument", "default")


@pytest.mark.parametrize("key", ["p2p_host", "controller_pull_url", "lmcache_instance_id", "weka_path"])
def test_keys_of_lmcache_that_lwkv_has_no_part_for_have_an_answer_of_their_own(key: str) -> None:
    assert Config(**{key: None}) == Config()
    text = refusal(lambda: Config(**{key: "x"}))
    assert text.startswith(f"{key}: got ")
    assert "a key of LMCache" in text
    assert "did you mean" not in text


def test_a_count_of_tokens_is_no_secret() -> None:
    text = refusal(lambda: Config(min_token_threshold=512, remote_token=513, max_tokens=514))
    assert "min_token_threshold: got 512" in text
    assert "max_tokens: got 514" in text
    assert "513" not in text


def test_a_blend_plan_pairs_layers_with_ratios_and_is_empty_without_blending() -> None:
    layers, ratios = [1, 8], [0.2, 0.1]
    settings: dict[str, Any] = {"blend_check_layers": layers, "blend_recompute_ratios": ratios}
    config = Config(enable_blending=True, use_layerwise=True, **settings)
    assert config.blend_plan == ((1, 0.2), (8, 0.1))
    assert Config(blend_recompute_ratios=ratios).blend_plan == ()


# the object


def test_a_config_cannot_be_changed_and_can_be_copied_and_sent() -> None:
    config = Config(chunk_size=7, blend_check_layers=[1, 2])
    with pytest.raises(ValueError, match="frozen"):
        config.chunk_size = 8
    with pytest.raises(ValueError, match="frozen"):
        config.extra_config.slab_bytes = 8
    assert {config: 1}[copy.deepcopy(config)] == 1
    assert pickle.loads(pickle.dumps(config)) == config


def test_every_setting_whose_status_is_reported_is_one() -> None:
    assert set(STATUS) <= set(Config.model_fields)


def test_help_shows_every_setting_in_a_readable_line() -> None:
    text = pydoc.render_doc(Config, renderer=pydoc.plaintext)
    assert "Config(*, chunk_size=256, local_cpu=True" in text
    assert "    max_local_cpu_size (number of GiB, 5.0): Most host memory for pages, kept or" in text
    assert all(f"    {key} (" in text for key in Config.model_fields)
    assert "BeforeValidator" not in text.split("Method resolution order")[0]


# docs/config.md


def documented(columns: int) -> list[list[str]]:
    lines = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if len(row) == columns]


def test_the_documentation_has_every_setting_as_it_is() -> None:
    assert documented(6) == [
        [
            f"`{key}`",
            f"`LWKV_{key.upper()}`",
            allowed_of(Config, key).kind,
            "see below" if key == "extra_config" else f"`{json.dumps(field.default)}`",
            field.description,
            STATUS.get(key, USED),
        ]
        for key, field in Config.model_fields.items()
    ]
    assert documented(4) == [
        [f"`{key}`", allowed_of(ExtraConfig, key).kind, f"`{json.dumps(field.default)}`", field.description]
        for key, field in ExtraConfig.model_fields.items()
    ]


def test_the_documentation_has_every_key_of_lmcache() -> None:
    assert documented(3) == [
        [f"`{key}`", " or ".join(f"`{json.dumps(same)}`" for same in known.same) or "none", known.advice]
        for key, known in LMCACHE_KEYS.items()
    ]
