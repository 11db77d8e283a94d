"""Who uses each setting: the last column of docs/config.md."""

from __future__ import annotations

USED = "every engine"
_TIERS = "tiers below host memory"
_BLENDING = "blending"

STATUS = {
    "write_policy": _TIERS,
    "enable_blending": "blending; refused in SGLang and for hybrid models",
    "blend_selector": _BLENDING,
    "blend_recompute_ratios": _BLENDING,
    "blend_check_layers": _BLENDING,
    "blend_min_tokens": _BLENDING,
    "blend_special_str": _BLENDING,
    "save_unfull_chunk": "every engine; refused in SGLang and for hybrid models",
    "save_decode_cache": "vLLM",
    "prefetch_layers": _TIERS,
    "load_timeout_s": _TIERS,
}
"""Who uses a setting; USED of all others."""
