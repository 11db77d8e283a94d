"""Which parts of a request's prompt may come from anywhere: as the request says, or between separators."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lwkv.blend.request import Segment, check_segments
from lwkv.blend.segments import Separator
from lwkv.errors import RequestError
from lwkv.telemetry.log_throttle import LogThrottle

log = logging.getLogger(__name__)

PARAMETER = "lwkv_segments"
"""In a request's `kv_transfer_params`: pairs (start, end) of token positions; none for no blending."""


MOST_SEGMENTS = 512
"""Segments of a prompt that is blended. Hashing one, and looking for it, takes the scheduler 0.1 ms."""


class PromptSegments:
    """Finds them. What a client gives wrongly is logged, and its prompt is not blended.

    Args:
        separator: of the tokenizer and `blend_special_str`; None where vLLM has no tokenizer.
    """

    def __init__(self, separator: Separator | None) -> None:
        self._separator = separator
        self._throttle = LogThrottle(log)

    def of(self, request: Any) -> tuple[Segment, ...]:
        """The segments of vLLM's request, ascending and apart from each other."""
        if not _can_be_blended(request):
            return ()
        parameters = request.kv_transfer_params or {}
        if not isinstance(parameters, Mapping):
            return self._refuse("kv_transfer_params", request, f"got {parameters!r:.200}; give an object")
        given = parameters.get(PARAMETER)
        if given is None:
            found = self._separator.segments(request.prompt_token_ids) if self._separator else ()
            return self._if_few(tuple(found), "the prompt", request)
        try:
            return self._if_few(check_segments(given, request.num_prompt_tokens), PARAMETER, request)
        except RequestError as error:
            return self._refuse(PARAMETER, request, error)

    def _if_few(self, found: tuple[Segment, ...], what: str, request: Any) -> tuple[Segment, ...]:
        if len(found) <= MOST_SEGMENTS:
            return found
        return self._refuse(what, request, f"{len(found)} segments; allowed: {MOST_SEGMENTS}")

    def _refuse(self, what: str, request: Any, why: object) -> tuple[Segment, ...]:
        self._throttle.warn("%s of request %s: %s; it is not blended", what, request.request_id, why)
        return ()


def _can_be_blended(request: Any) -> bool:
    """Whether it generates text from token ids alone, with KV that no adapter changes."""
    return (
        request.prompt_token_ids is not None
        and getattr(request, "prompt_embeds", None) is None
        and not getattr(request, "mm_features", None)
        and getattr(request, "lora_request", None) is None
        and getattr(request, "sampling_params", None) is not None
        and not getattr(request, "resumable", False)
    )
