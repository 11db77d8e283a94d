"""Which settings this version of lwkv does not use, or not wholly."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lwkv.config import Config

USED = "used"
NO_EFFECT = "no effect yet"

STATUS = {
    "write_policy": "used by tiers below host memory",
    "enable_blending": "chooses the buffer connector; no blending yet",
    "blend_recompute_ratios": NO_EFFECT,
    "blend_check_layers": NO_EFFECT,
    "blend_min_tokens": NO_EFFECT,
    "blend_special_str": NO_EFFECT,
    "save_decode_cache": "used by the vLLM connector",
    "prefetch_layers": "used by tiers below host memory",
    "load_timeout_s": "used by tiers below host memory",
}
"""What becomes of a setting; USED of all others."""


def without_effect(config: Config) -> list[str]:
    """The settings that ask for something else than the default and do not get it."""
    defaults = type(config).model_fields
    return [
        key
        for key, status in STATUS.items()
        if status == NO_EFFECT and getattr(config, key) != defaults[key].default
    ]
