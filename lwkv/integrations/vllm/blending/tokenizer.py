"""What blending needs of vLLM's tokenizer: the ids of the shared prefix, and of the separator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lwkv.blend.segments import Encode, Separator
from lwkv.blend.shared_prefix import shared_prefix_ids
from lwkv.errors import ConfigError
from lwkv.integrations.vllm.settings import Settings


def prefix_ids(settings: Settings, encode: Encode | None) -> tuple[int, ...]:
    """The ids that `blend_shared_prefix` means.

    Args:
        encode: vLLM's tokenizer; None where it has none.

    Raises:
        ConfigError: a text, or lwkv's own, and no tokenizer.
    """
    given = settings.blend_shared_prefix
    if isinstance(given, tuple):
        return shared_prefix_ids(given)
    if encode is None:
        raise ConfigError(
            f"blend_shared_prefix: got {given!r}, and vLLM runs without a tokenizer; give a list of token "
            "ids, or [] for none, which is nearly always worse"
        )
    return shared_prefix_ids(encode) if given is None else tuple(encode(given))


def find_separator(settings: Settings, encode: Encode | None) -> Separator | None:
    """How `blend_special_str` is found in token ids; None without a tokenizer. Raises ConfigError."""
    return None if encode is None else Separator(encode, settings.blend_special_str)


def encoder(model_config: Any) -> Encode | None:
    """What makes token ids of a text; None where vLLM does not."""
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(model_config)
    encode: Callable[..., Any] | None = getattr(tokenizer, "encode", None)
    return encode
