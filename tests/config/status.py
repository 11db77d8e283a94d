"""Which settings are used by some parts of lwkv only: what docs/config.md says of each."""

from __future__ import annotations

USED = "used"
_TIERS = "used by tiers below host memory"
_BLENDING = "used by lwkv.blend"

STATUS = {
    "write_policy": _TIERS,
    "enable_blending": "used by lwkv.blend and in vLLM; refused in SGLang",
    "blend_selector": _BLENDING,
    "blend_recompute_ratios": _BLENDING,
    "blend_check_layers": _BLENDING,
    "blend_min_tokens": _BLENDING,
    "blend_special_str": _BLENDING,
    "save_unfull_chunk": "used; refused in SGLang",
    "save_decode_cache": "used by the vLLM connector",
    "prefetch_layers": _TIERS,
    "load_timeout_s": _TIERS,
}
"""Who uses a setting; USED of all others."""
