"""LMCache's keys that lwkv has no switch for, so that a file written for LMCache is understood or refused.

Such a key is taken where it asks for what lwkv does anyway, and is an error with any other value: nothing
that a user wrote is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lwkv.config.messages import Origins, shown
from lwkv.config.values import read_flag
from lwkv.errors import ConfigError


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

LMCACHE_KEYS: Mapping[str, LMCacheKey] = {
    "remote_serde": LMCacheKey((None, "naive"), "pages are stored as the raw bytes they are; use naive"),
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
    "min_retrieve_tokens": LMCacheKey((0,), "every hit is loaded; use 0"),
    "blend_thresholds": LMCacheKey((None,), "use blend_recompute_ratios"),
    "py_enable_gc": LMCacheKey((True,), "lwkv leaves the garbage collector alone; use true"),
    "enable_p2p": LMCacheKey((False,), _ABSENT),
    "enable_pd": LMCacheKey((False,), _ABSENT),
    "enable_controller": LMCacheKey((False,), _ABSENT),
    "enable_kv_events": LMCacheKey((False,), _ABSENT),
    "internal_api_server_enabled": LMCacheKey((False,), _ABSENT),
    "retrieve_locations": LMCacheKey((None,), _ABSENT),
    "store_location": LMCacheKey((None,), _ABSENT),
    "external_lookup_client": LMCacheKey((None,), _ABSENT),
    "gds_path": LMCacheKey((None,), "use local_disk"),
    "use_gds": LMCacheKey((False,), "use local_disk; disk reads go through host memory"),
}


def without_lmcache_keys(values: Mapping[str, object], origins: Origins) -> dict[str, object]:
    """Take LMCache's keys out of `values`. Raises ConfigError where one asks for what lwkv does not do."""
    wrong = [
        _refusal(key, values[key], origins.get(key, "argument"))
        for key in values
        if key in LMCACHE_KEYS and not _asks_for_the_same(values[key], LMCACHE_KEYS[key].same)
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))
    return {key: value for key, value in values.items() if key not in LMCACHE_KEYS}


def _refusal(key: str, value: object, origin: str) -> str:
    allowed = " or ".join(repr(item) for item in LMCACHE_KEYS[key].same) or "nothing"
    got = f"{key}: got {shown(value)} ({origin})"
    return f"{got}, a key of LMCache; allowed: {allowed}; {LMCACHE_KEYS[key].advice}"


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
