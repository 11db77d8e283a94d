"""LMCache's keys that lwkv has no switch for, so that a file written for LMCache is understood or refused.

Such a key is taken where it asks for what lwkv does anyway, and is an error with any other value: nothing
that a user wrote is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from lwkv.config.messages import Origins, shown, shown_under
from lwkv.config.values import read_flag


@dataclass(frozen=True)
class LMCacheKey:
    """`same` holds the values that ask for what lwkv does; `advice` says what to do with any other."""

    same: tuple[object, ...]
    advice: str


_ABSENT = "lwkv has no such part; remove the key"
_MEMORY = (
    "host memory is page-locked in the background from the start; "
    "to wait for some, set extra_config.reserve_gib"
)
_DISK = "use local_disk"

LMCACHE_KEYS: Mapping[str, LMCacheKey] = {
    "remote_serde": LMCacheKey((None, "naive"), "pages keep every bit unless page_codec is fp8; use naive"),
    "cache_policy": LMCacheKey(("LRU",), "the chunk used longest ago goes first; use LRU"),
    "pre_caching_hash_algorithm": LMCacheKey(
        (), "keys always come from one cryptographic hash, equal in every process; remove the key"
    ),
    "blocking_timeout_secs": LMCacheKey((), "use load_timeout_s"),
    "lookup_timeout_ms": LMCacheKey((), "use load_timeout_s, in seconds"),
    "reserve_local_cpu_size": LMCacheKey((0.0,), "lower max_local_cpu_size instead"),
    "local_cpu_use_hugepages": LMCacheKey(
        (False,), "use transparent huge pages of the system; remove the key"
    ),
    "enable_lazy_memory_allocator": LMCacheKey((True,), _MEMORY),
    "numa_mode": LMCacheKey((None,), "bind the process with numactl; remove the key"),
    "enable_async_loading": LMCacheKey((False,), "use use_layerwise, which loads while the model computes"),
    "min_retrieve_tokens": LMCacheKey(
        (0,), "no hit is too short to be loaded; in vLLM load_when decides; use 0"
    ),
    "blend_thresholds": LMCacheKey((None,), "use blend_recompute_ratios"),
    "py_enable_gc": LMCacheKey((True,), "lwkv leaves the garbage collector alone; use true"),
    "enable_p2p": LMCacheKey((False,), _ABSENT),
    "enable_pd": LMCacheKey((False,), _ABSENT),
    "enable_controller": LMCacheKey((False,), _ABSENT),
    "enable_kv_events": LMCacheKey(
        (False,),
        "in vLLM, lwkv's events come with vLLM's: --kv-events-config '{\"enable_kv_cache_events\": true}'",
    ),
    "lmcache_instance_id": LMCacheKey(
        (None,), "engines need no names, and there is no controller; remove it"
    ),
    "lmcache_worker_*": LMCacheKey((None,), "there is no controller; remove the key"),
    "controller_*": LMCacheKey((None,), "there is no controller; remove the key"),
    "p2p_*": LMCacheKey((None,), "engines share what they have through a tier: use remote_url"),
    "pd_*": LMCacheKey((None,), "prefill and decode engines share a tier: use remote_url"),
    "nixl_*": LMCacheKey((None,), "use local_disk or remote_url"),
    "internal_api_server_enabled": LMCacheKey((False,), _ABSENT),
    "retrieve_locations": LMCacheKey((None,), _ABSENT),
    "store_location": LMCacheKey((None,), _ABSENT),
    "external_lookup_client": LMCacheKey((None,), _ABSENT),
    "gds_path": LMCacheKey((None,), _DISK),
    "weka_path": LMCacheKey((None,), "use local_disk, with a folder of that file system"),
    "use_gds": LMCacheKey((False,), f"{_DISK}; disk reads go through host memory"),
}
"""A `*` stands for the rest of a name."""

_MOONCAKE = "mooncakestore://"


def take_lmcache_keys(values: Mapping[str, object], origins: Origins) -> tuple[dict[str, object], list[str]]:
    """Take LMCache's keys out of `values`: the others, and a line for each that lwkv does not do."""
    known = {key: found for key in values if (found := _find(key)) is not None}
    wrong = [
        _refusal(key, values[key], origins.get(key, "argument"), found)
        for key, found in known.items()
        if not _asks_for_the_same(values[key], found.same)
    ]
    return {key: value for key, value in values.items() if key not in known}, wrong


def find_lmcache_url(url: object, origins: Origins) -> list[str]:
    """A line where `url` is Mooncake's in LMCache's form."""
    if not isinstance(url, str) or not url.strip().lower().startswith(_MOONCAKE):
        return []
    got = f"remote_url: got {shown_under('remote_url', url)} ({origins.get('remote_url', 'argument')})"
    return [
        f"{got}, LMCache's form of a Mooncake URL; use mooncake://master:50051, with what LMCache has in "
        "extra_config as options, as in ?metadata=http://host:8080/metadata&protocol=rdma (docs/remote.md)"
    ]


def _find(key: str) -> LMCacheKey | None:
    return next((known for name, known in LMCACHE_KEYS.items() if fnmatchcase(key, name)), None)


def _refusal(key: str, value: object, origin: str, known: LMCacheKey) -> str:
    allowed = " or ".join(json.dumps(item) for item in known.same) or "no value"
    # Of a key that is known by its beginning alone the value may be an address.
    got = f"{key}: got {shown(value) if key in LMCACHE_KEYS else shown_under(key, value)} ({origin})"
    return f"{got}, a key of LMCache; allowed: {allowed}; {known.advice}"


def _asks_for_the_same(value: object, same: tuple[object, ...]) -> bool:
    return any(_means(value, item) for item in same)


def _means(value: object, wanted: object) -> bool:
    if wanted is None:
        return value is None or value is False
    if isinstance(wanted, bool):
        return _flag(value) is wanted
    if isinstance(wanted, str):
        return isinstance(value, str) and value.lower() == wanted.lower()
    return not isinstance(value, bool) and value == wanted


def _flag(value: object) -> bool | None:
    try:
        return read_flag(value)
    except ValueError:
        return None
