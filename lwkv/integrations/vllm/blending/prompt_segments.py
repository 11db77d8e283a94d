"""Which parts of a request's prompt may come from anywhere: as the request says, or between separators."""

from __future__ import annotations

import logging
from typing import Any

from lwkv.blend.request import Segment, check_segments
from lwkv.blend.segments import Separator
from lwkv.errors import RequestError
from lwkv.telemetry.log_throttle import LogThrottle

log = logging.getLogger(__name__)

PARAMETER = "lwkv_segments"
"""In a request's `kv_transfer_params`: pairs (start, end) of token positions; none for no blending."""


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
        given = (request.kv_transfer_params or {}).get(PARAMETER)
        if given is None:
            found = self._separator.segments(request.prompt_token_ids) if self._separator else ()
            return tuple(found)
        try:
            return check_segments(given, request.num_prompt_tokens)
        except RequestError as error:
            self._throttle.warn(
                "%s of request %s: %s; it is not blended", PARAMETER, request.request_id, error
            )
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
