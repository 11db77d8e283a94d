"""What a user may get wrong, one row each: the error names the setting, what was got and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lwkv.cli.doctor import command as doctor
from lwkv.config.engine_settings import ENGINE_SETTINGS, SGLANG, VLLM
from lwkv.config.settings import Config
from lwkv.errors import ConfigError
from lwkv.integrations.sglang import settings as sglang
from lwkv.integrations.vllm import settings as vllm
from lwkv.platforms import detect_platform
from lwkv.storage.registry import examine_tier
from lwkv.telemetry.log_level import follow_log_level

SECRET = "hunter2"
PAGE = 64


@dataclass(frozen=True)
class Wrong:
    """`given` is wrong; the error has `key`, `got` and each of `remedy`."""

    given: Any
    key: str
    got: str
    remedy: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.given}"[:60]


def wrong(given: Any, key: str, got: str, *remedy: str) -> Wrong:
    return Wrong(given, key, got, remedy)


BLENDING = {"enable_blending": True, "use_layerwise": True}
ARGUMENTS = [
    # the wrong type
    wrong({"chunk_size": "256"}, "chunk_size", "'256'", "without quotes"),
    wrong({"chunk_size": 256.5}, "chunk_size", "256.5", "a whole number of 1 or more"),
    wrong({"chunk_size": None}, "chunk_size", "None", "for the default (256) leave it out"),
    wrong({"chunk_size": [256]}, "chunk_size", "[256]", "a whole number"),
    wrong({"local_cpu": "maybe"}, "local_cpu", "'maybe'", "true, yes, on, 1, false, no, off or 0"),
    wrong({"use_layerwise": 2}, "use_layerwise", "2", "true, yes, on, 1, false, no, off or 0"),
    wrong({"local_cpu": None}, "local_cpu", "None", "for the default (true) leave it out"),
    wrong({"local_disk": True}, "local_disk", "True", "null, a folder such as /var/cache/lwkv"),
    wrong({"local_disk": ["/a", "/b"]}, "local_disk", "['/a', '/b']", "a folder such as"),
    wrong({"extra_config": 3}, "extra_config", "3", "a mapping with keys group_bytes"),
    wrong({"remote_url": 6379}, "remote_url", "***", "it is no text", "redis://host:6379"),
    # out of range
    wrong({"chunk_size": 0}, "chunk_size", "0", "a whole number of 1 or more"),
    wrong({"max_local_cpu_size": 0}, "max_local_cpu_size", "0", "number of GiB above 0"),
    wrong({"max_local_disk_size": -1}, "max_local_disk_size", "-1", "from 0 to 1048576"),
    wrong({"max_local_cpu_size": float("nan")}, "max_local_cpu_size", "nan", "a finite number of GiB"),
    wrong({"load_timeout_s": 0}, "load_timeout_s", "0", "seconds above 0 and up to 86400"),
    wrong({"blend_recompute_ratios": 15}, "blend_recompute_ratios", "15", "a number from 0 to 1"),
    wrong({"blend_check_layers": [3, 1]}, "blend_check_layers", "[3, 1]", "an ascending list"),
    wrong({"blend_special_str": ""}, "blend_special_str", "''", "at least one character"),
    wrong({"extra_config": {"staging_buffers": 1}}, "extra_config.staging_buffers", "1", "from 2 to 64"),
    wrong({"write_policy": "writeback"}, "write_policy", "'writeback'", "write_through or write_back"),
    wrong({"page_codec": "zstd"}, "page_codec", "'zstd'", "auto, raw, lossless or fp8"),
    # the wrong unit
    wrong({"max_local_cpu_size": "40GB"}, "max_local_cpu_size", "'40GB'", "without a unit: it is in GiB"),
    wrong({"max_local_cpu_size": 40 << 30}, "max_local_cpu_size", "42949672960", "not in bytes"),
    wrong({"load_timeout_s": "10s"}, "load_timeout_s", "'10s'", "without a unit: it is in seconds"),
    wrong({"load_timeout_ms": 10_000}, "load_timeout_ms", "10000", "did you mean load_timeout_s?"),
    wrong({"blend_recompute_ratios": "15%"}, "blend_recompute_ratios", "'15%'", "0.15 for 15 %"),
    wrong({"extra_config": {"slab_bytes": "64MB"}}, "extra_config.slab_bytes", "'64MB'", "without a unit"),
    # a key that is none
    wrong({"chunk_sise": 4}, "chunk_sise", "4", "did you mean chunk_size?"),
    wrong({"chunk-size": 4}, "chunk-size", "4", "did you mean chunk_size?"),
    wrong({"max_cpu_size": 4}, "max_cpu_size", "4", "did you mean max_local_cpu_size?"),
    wrong({"slab_bytes": 4}, "slab_bytes", "4", "write extra_config: {slab_bytes: ...}"),
    wrong(
        {"extra_config": {"chunk_size": 4}}, "extra_config.chunk_size", "4", "write it beside extra_config"
    ),
    wrong({"extra_config": {"slab_byte": 4}}, "extra_config.slab_byte", "4", "did you mean slab_bytes?"),
    wrong({"load_when": "always"}, "load_when", "'always'", "vLLM only", "kv_connector_extra_config"),
    wrong({"on_flush": "keep"}, "on_flush", "'keep'", "SGLang only", "linker_extra_config"),
    wrong({"on_flsh": "keep"}, "on_flsh", "'keep'", "did you mean on_flush?"),
    wrong({"remote_password": SECRET}, "remote_password", "***", "set LWKV_REMOTE_PASSWORD"),
    wrong({"api_key": SECRET}, "api_key", "***", "*** stands for what may be a secret"),
    wrong({"platform": "cpu"}, "platform", "'cpu'", "set LWKV_PLATFORM"),
    # addresses
    wrong({"remote_url": "localhost:6379"}, "remote_url", "***", "it does not begin with a scheme"),
    wrong({"remote_url": "redis:/host"}, "remote_url", "***", "it does not begin with a scheme"),
    wrong({"remote_url": "redis://"}, "remote_url", "'redis://'", "nothing follows the scheme"),
    wrong({"remote_url": "redis:///0"}, "remote_url", "'redis:///***'", "no host is where a host should be"),
    wrong({"remote_url": "redis://h:port"}, "remote_url", "redis://***", "no port, a number from 1 to 65535"),
    wrong({"remote_url": "valkey://h:99999"}, "remote_url", "valkey://***", "a number from 1 to 65535"),
    wrong({"remote_url": "redis://h:0"}, "remote_url", "redis://h:0", "a number from 1 to 65535"),
    wrong({"remote_url": "redis://[::1:63"}, "remote_url", "redis://***", "in brackets, as [::1]:6379"),
    wrong({"remote_url": f"redis://me:{SECRET} x@h:1"}, "remote_url", "***@h:1", "write %20"),
    wrong({"remote_url": f"redis://me:{SECRET}/x@h:1"}, "remote_url", "***@h:1", "write % and two digits"),
    wrong({"remote_ulr": f"redis://me:{SECRET}@h:1"}, "remote_ulr", "***", "did you mean remote_url?"),
    wrong({"remote_url": "mooncakestore://h:1"}, "remote_url", "mooncakestore://h:1", "mooncake://master"),
    wrong({"local_disk": "s3://bucket"}, "local_disk", "'s3://bucket'", "a URL and no path"),
    wrong({"local_disk": ""}, "local_disk", "''", "it names no path"),
    wrong({"host_memory": "tcp://h:1"}, "host_memory", "'tcp://h:1'", "a URL and no path", "lwkv/host.sock"),
    wrong({"host_memory": "lwkv/host.sock"}, "host_memory", "'lwkv/host.sock'", "it is relative", "absolute"),
    wrong({"host_memory_timeout_s": 1}, "host_memory_timeout_s", "1", "write extra_config: {host_memory_"),
    # what does not go together
    wrong(
        {"host_memory": "/a", "local_cpu": False, "remote_url": "redis://h"},
        *("host_memory='/a'", "local_cpu=False", "set local_cpu to true"),
    ),
    wrong({"local_disk": "/a"}, "max_local_disk_size=0.0 (default)", "'/a'", "a size above 0"),
    wrong({"local_cpu": False}, "local_cpu=False", "remote_url=None (default)", "switch one of them on"),
    wrong({"enable_blending": True}, "enable_blending=True", "(default)", "set use_layerwise to true"),
    wrong({**BLENDING, "use_gpu": False}, "enable_blending=True", "use_gpu=False", "set use_gpu to true"),
    wrong({**BLENDING, "blend_check_layers": [1, 8]}, "blend_check_layers", "(1, 8)", "its ratio"),
    wrong({"extra_config": {"reserve_gib": 6}}, "extra_config.reserve_gib", "6.0", "lower the first"),
    wrong(
        {"use_gpu": False, "extra_config": {"staging_bytes": 4}},
        "use_gpu=False",
        "=4",
        "leave staging_bytes out",
    ),
    wrong(
        {"write_policy": "write_back", "local_cpu": False, "remote_url": "redis://h"},
        *("write_policy='write_back'", "local_cpu=False", "set write_policy to write_through"),
    ),
    # keys of LMCache
    wrong(
        {"remote_serde": "cachegen"}, "remote_serde", "'cachegen'", 'allowed: null or "naive"', "use naive"
    ),
    wrong({"cache_policy": "LFU"}, "cache_policy", "'LFU'", "use LRU"),
    wrong({"enable_p2p": True}, "enable_p2p", "True", "a key of LMCache", "remove the key"),
    wrong({"p2p_host": f"me:{SECRET}@h"}, "p2p_host", "***", "a key of LMCache", "use remote_url"),
    wrong({"gds_path": "/a"}, "gds_path", "'/a'", "use local_disk"),
    wrong({"enable_kv_events": True}, "enable_kv_events", "True", "--kv-events-config"),
    wrong({"lookup_timeout_ms": 5}, "lookup_timeout_ms", "5", "use load_timeout_s, in seconds"),
]
VARIABLES = [
    wrong({"LWKV_CHUNK_SIZE": "many"}, "chunk_size", "LWKV_CHUNK_SIZE=many", "a whole number"),
    wrong({"LWKV_MAX_LOCAL_CPU_SIZE": "4,5"}, "max_local_cpu_size", "[4, 5]", "with a point for fractions"),
    wrong({"LWKV_LOCAL_CPU": ""}, "local_cpu", "LWKV_LOCAL_CPU=", "for the default (true) leave it out"),
    wrong({"LWKV_REMOTE_URL": ""}, "remote_url", "got ''", "for the default (null) leave it out"),
    wrong({"LWKV_REMOTE_URL": f"me:{SECRET}@h"}, "remote_url", "LWKV_REMOTE_URL)", "with a scheme"),
    wrong({"LWKV_LOAD_WEHN": "always"}, "LWKV_LOAD_WEHN", "'always'", "did you mean LWKV_LOAD_WHEN?"),
    wrong({"LWKV_CHUNKSIZE": "4"}, "LWKV_CHUNKSIZE", "'4'", "did you mean LWKV_CHUNK_SIZE?"),
    wrong({"LWKV_REMOTE_PASWORD": SECRET}, "LWKV_REMOTE_PASWORD", "***", "mean LWKV_REMOTE_PASSWORD?"),
    wrong({"LWKV_EXTRA_CONFIG": "slab_bytes=4"}, "extra_config", "slab_bytes=4", "a mapping with keys"),
    wrong({"LWKV_EXTRA_CONFIG": "{slab_bytes: 4"}, "LWKV_EXTRA_CONFIG", "***", "is not closed"),
    wrong({"LWKV_BLEND_CHECK_LAYERS": "a,b"}, "blend_check_layers", "['a', 'b']", "an ascending list"),
    wrong({"LWKV_CONFIG_FILE": "/no/such.yaml"}, "LWKV_CONFIG_FILE", "/no/such.yaml", "No such file"),
    wrong({"LWKV_CONFIG_FILE": "/dev/null/a"}, "LWKV_CONFIG_FILE", "/dev/null/a", "Not a directory"),
    wrong({"LWKV_CONFIG_FILE": "/"}, "LWKV_CONFIG_FILE", "'/'", "Is a directory"),
    wrong({"LWKV_CONFIG_FILE": ""}, "LWKV_CONFIG_FILE", "''", "unset the variable"),
]
FILES = [
    wrong("chunk_size 256", "lwkv.yaml", "'chunk_size 256'", "lines of `key: value`"),
    wrong("chunk_size=256", "lwkv.yaml", "'chunk_size=256'", "lines of `key: value`"),
    wrong("- chunk_size: 256", "lwkv.yaml", "[{'chunk_size': 256}]", "lines of `key: value`"),
    wrong("chunk_size: 1\nchunk_size: 2", "chunk_size", "line 1 and again in line 2", "keep one"),
    wrong("extra_config:\n  slab_bytes: 1\n  slab_bytes: 2", "slab_bytes", "in line 3", "keep one"),
    wrong("chunk_size:", "chunk_size", "None", "for the default (256) leave it out"),
    wrong("chunk_size: [", "lwkv.yaml", "line 1", "a bracket or quote is not closed"),
    wrong("\tchunk_size: 3", "lwkv.yaml", "line 1, column 1", "indent with spaces"),
    wrong("chunk_size: 3\n---\nlocal_cpu: 1", "lwkv.yaml", "line 2", "leave out the line of three dashes"),
    wrong("a: &a 3\nchunk_size: *a", "lwkv.yaml", "line 2", "write the value out"),
    wrong("chunk_size: !!int 3", "lwkv.yaml", "line 1", "leave the tag out"),
    wrong(f"remote_url: redis://me:{SECRET}: x@h", "lwkv.yaml", "line 1", "a colon in quotes"),
    wrong(b"local_disk: \xff", "lwkv.yaml", "byte 13", "save the file as UTF-8"),
    wrong("lwkv:\n  chunk_size: 3", "lwkv", "{'chunk_size': 3}", "move them out of it"),
    wrong("max_local_cpu_size: 5,5", "max_local_cpu_size", "'5,5'", "a point for fractions"),
    wrong("chunk_size: 3_000", "chunk_size", "'3_000'", "nothing between thousands"),
    wrong("local_cpu: 1.0", "local_cpu", "1.0", "true, yes, on, 1, false, no, off or 0"),
    wrong(
        "on_flush: keep\nload_when: always",
        *("settings of two engines, of which each refuses the other's", "on_flush: got 'keep' (file "),
        *("is for SGLang only", "load_when: got 'always' (file ", "is for vLLM only"),
        "Write on_flush in linker_extra_config of SGLang and load_when in kv_connector_extra_config of vLLM",
    ),
]
OF_VLLM = [
    wrong({"on_load_failure": "ignore"}, "on_load_failure", "'ignore'", "recompute or fail"),
    wrong({"load_when": True}, "load_when", "True (kv_connector_extra_config)", "cheaper or always"),
    wrong({"prefetch_waiting": "x"}, "prefetch_waiting", "'x'", "true, yes, on, 1, false, no, off or 0"),
    wrong({"kv_load_failure_policy": "fail"}, "kv_load_failure_policy", "'fail'", "mean on_load_failure?"),
    wrong(
        {"extra_config": {"host_memory_gib": 2}}, "extra_config.host_memory_gib", "2", "say where, or leave"
    ),
    wrong({"enable_blending": True, "host_memory": "/s"}, "enable_blending", "True", "leave one of them out"),
    wrong({"blend_shared_prefix": [1.5]}, "blend_shared_prefix", "[1.5]", "null, text, or a list of token"),
    wrong({"save_unfull_chunk": True, "save_decode_cache": True}, "save_unfull_chunk", "True", "to false"),
    wrong(
        {"on_flush": "keep"},
        *("on_flush", "'keep'", "SGLang only, and these are vLLM's settings", "leave it out here"),
        "linker_extra_config of SGLang",
    ),
    wrong({"max_local_cpu_size": "40"}, "max_local_cpu_size", "'40'", "without quotes"),
]
OF_SGLANG = [
    wrong({"on_flush": "no"}, "on_flush", "'no' (linker_extra_config)", "forget or keep"),
    wrong({"chunk_size": 8}, "chunk_size", "8", "allowed is 64", "--page-size"),
    wrong({"use_layerwise": False}, "use_layerwise", "False", "allowed is true"),
    wrong({"save_unfull_chunk": True}, "save_unfull_chunk", "True", "allowed is false"),
    wrong(
        {"on_load_failure": "fail"},
        *("on_load_failure", "'fail'", "vLLM only, and these are SGLang's settings", "leave it out here"),
    ),
]
TIERS = [
    wrong("lm://h:1", "remote_url", "lm://", "redis://", "entry point lwkv.tiers"),
    wrong("reddis://h:1", "remote_url", "reddis://", "did you mean redis?"),
    wrong("redis://h/main", "remote_url", "redis://h:6379", "no number of a database"),
    wrong("redis://h?tls=yes", "remote_url", "'tls'", "allowed: cluster, timeout_s"),
    wrong("redis://h?timeout_s=soon", "remote_url", "timeout_s is 'soon'", "a number above 0"),
    wrong("rediss://h?ca=/no/such", "remote_url", "/no/such", "ca cannot be read"),
    wrong("redis://h?ca=/a", "remote_url", "redis://h:6379", "write valkeys:// or rediss://"),
    wrong(f"redis://me:{SECRET}@h?color=red", "remote_url", "'color'", "allowed: cluster"),
]


@pytest.fixture(autouse=True)
def _nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in [*Config.model_fields, *ENGINE_SETTINGS, "config_file"]:
        monkeypatch.delenv(f"LWKV_{key.upper()}", raising=False)


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as error:
        make()
    return str(error.value)


def check(text: str, case: Wrong) -> None:
    for part in (case.key, case.got, *case.remedy):
        assert part in text
    assert SECRET not in text
    is_explained = "*** stands for what may be a secret" in text
    assert is_explained == ("***" in text)


def write(folder: Path, text: str | bytes) -> Path:
    file = folder / "lwkv.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


@pytest.mark.parametrize("case", ARGUMENTS, ids=str)
def test_a_wrong_argument_says_which_what_and_what_to_do(case: Wrong) -> None:
    check(refusal(lambda: Config(**case.given)), case)


@pytest.mark.parametrize("case", VARIABLES, ids=str)
def test_a_wrong_variable_says_which_what_and_what_to_do_also_in_the_doctor(
    case: Wrong, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in case.given.items():
        monkeypatch.setenv(name, value)
    check(refusal(Config.load), case)
    check(fault_of_the_doctor(), case)


@pytest.mark.parametrize("case", FILES, ids=str)
def test_a_wrong_file_says_where_what_and_what_to_do_also_in_the_doctor(
    case: Wrong, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, case.given)
    check(refusal(lambda: Config.load(file)), case)
    monkeypatch.setenv("LWKV_CONFIG_FILE", str(file))
    check(fault_of_the_doctor(), case)


@pytest.mark.parametrize("case", OF_VLLM, ids=str)
def test_a_wrong_setting_of_vllm_says_which_what_and_what_to_do(case: Wrong) -> None:
    check(refusal(lambda: vllm.read_settings(case.given)), case)


@pytest.mark.parametrize("case", OF_SGLANG, ids=str)
def test_a_wrong_setting_of_sglang_says_which_what_and_what_to_do(case: Wrong) -> None:
    check(refusal(lambda: sglang.read_settings(case.given, PAGE)), case)


@pytest.mark.parametrize("case", TIERS, ids=str)
def test_a_wrong_tier_says_which_what_and_what_to_do(case: Wrong) -> None:
    text = refusal(lambda: examine_tier(case.given, Config(remote_url=case.given)))
    for part in (case.key, case.got, *case.remedy):
        assert part in text
    assert SECRET not in text


def test_a_wrong_log_level_and_a_wrong_platform_say_which_and_what_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LWKV_LOG_LEVEL", "loud")
    text = refusal(follow_log_level)
    assert "LWKV_LOG_LEVEL: got 'loud'; allowed: debug, info, warning, error, critical" in text
    monkeypatch.setenv("LWKV_PLATFORM", "tpu9")
    with pytest.raises(ValueError, match=r"'tpu9'.*cpu"):
        detect_platform()


def test_there_are_sixty_and_they_are_all_reported_at_once() -> None:
    assert len(ARGUMENTS) + len(VARIABLES) + len(FILES) + len(OF_VLLM) + len(OF_SGLANG) + len(TIERS) >= 60
    alone = list(each_of_its_own())
    given = {key: value for case in alone for key, value in case.given.items()}
    assert len(given) == len(alone) > 10
    text = refusal(lambda: Config(**given))
    for case in alone:
        check(text, case)


def each_of_its_own() -> Iterator[Wrong]:
    """Rows that are about one key, one for each key and as many as an error text shows."""
    seen: set[str] = set()
    for case in ARGUMENTS:
        if len(case.given) == 1 and case.key in case.given and not seen & set(case.given) and len(seen) < 25:
            seen |= set(case.given)
            yield case


@pytest.mark.parametrize(
    ("read", "variable", "engine"),
    [
        (lambda: vllm.read_settings({}), {"LWKV_ON_FLUSH": "keep"}, "vLLM"),
        (lambda: sglang.read_settings({}, PAGE), {"LWKV_LOAD_WHEN": "always"}, "SGLang"),
    ],
)
def test_a_variable_of_the_other_engine_is_refused_as_such(
    read: Callable[[], object], variable: dict[str, str], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((name, value),) = variable.items()
    monkeypatch.setenv(name, value)
    text = refusal(read)
    assert f"got '{value}' (environment variable {name}={value})" in text
    assert f"and these are {engine}'s settings; leave it out here, and write it in " in text
    assert "no such key" not in text
    assert "names no setting" not in text


def test_one_line_is_enough_for_settings_of_two_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LWKV_ON_FLUSH", "keep")
    monkeypatch.setenv("LWKV_LOAD_WHEN", "always")
    monkeypatch.setenv("LWKV_ON_LOAD_FAILURE", "fail")
    assert len(refusal(Config.load).splitlines()) == 1
    assert "load_when, on_load_failure in kv_connector_extra_config of vLLM" in refusal(Config.load)


def test_the_settings_that_only_an_engine_has_are_known_by_name() -> None:
    for engine, settings in ((VLLM, vllm.Settings), (SGLANG, sglang.Settings)):
        own = {name for name in settings.model_fields if name not in Config.model_fields}
        assert own == {name for name, owner in ENGINE_SETTINGS.items() if owner is engine}
        assert engine.module == settings.__module__


def fault_of_the_doctor() -> str:
    report = doctor.Report({})
    assert doctor._examine_settings(report) is None
    (fault,) = report.faults
    assert fault.startswith("the configuration cannot be used: ")
    return fault
