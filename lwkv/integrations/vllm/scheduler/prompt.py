"""The tokens of a request of vLLM, as its chunks are named by them."""

from __future__ import annotations

from hashlib import shake_128
from typing import Any

import numpy as np

from lwkv.platforms.protocol import Int64s

_MEDIA_BIT = 1 << 62


def token_ids(request: Any, num_tokens: int, first: int = 0) -> Int64s:
    """The ids of tokens [first, num_tokens), int64, prompt and output, on which the KV depends.

    Placeholders of images and other media are the same in every prompt. Each is replaced by 62 bits out of
    its medium's own identifier, so that keys depend on every medium and on where it stands.
    """
    tokens = request.all_token_ids[first:num_tokens]
    ids = np.fromiter(tokens, np.int64, len(tokens))  # in less time than np.array
    for feature in getattr(request, "mm_features", None) or ():
        offset, length = feature.mm_position.offset, feature.mm_position.length
        # The range may begin or end within a medium.
        begin, end = max(offset, first), min(offset + length, first + len(ids))
        if begin < end:
            stand_ins = _stand_ins(str(feature.identifier), length)
            ids[begin - first : end - first] = stand_ins[begin - offset : end - offset]
    return ids


def salts_of(request: Any, epoch: str = "") -> tuple[str, ...]:
    """What beside the tokens decides the KV: LoRA, cache salt, and the last reset of the cache."""
    salts: list[str] = []
    lora = getattr(request, "lora_request", None)
    if lora is not None:
        salts += ["lora", str(lora.lora_name), str(getattr(lora, "lora_path", ""))]
    if getattr(request, "cache_salt", None):
        salts += ["salt", str(request.cache_salt)]
    if epoch:
        salts += ["epoch", epoch]
    return tuple(salts)


def is_cacheable(request: Any) -> bool:
    """Whether token ids tell all of the prompt; embeddings have none."""
    return request.prompt_token_ids is not None and getattr(request, "prompt_embeds", None) is None


def wants_hits(request: Any) -> bool:
    """Whether cached tokens may be left out of the computation; prompt log-probabilities need them all."""
    if getattr(request, "skip_reading_prefix_cache", False):
        return False
    parameters = getattr(request, "sampling_params", None)
    return getattr(parameters, "prompt_logprobs", None) is None


def _stand_ins(identifier: str, length: int) -> Int64s:
    words = np.frombuffer(shake_128(identifier.encode()).digest(8 * length), "<i8")
    ids: Int64s = (words & (_MEDIA_BIT - 1)) | _MEDIA_BIT
    return ids
