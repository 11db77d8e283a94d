"""What the log says where layers with a window keep all tokens, in one group with all others."""

from __future__ import annotations

import logging
from typing import Any

from lwkv.integrations.vllm.hybrid.refusals import OLDEST, can_have_groups
from lwkv.integrations.vllm.worker.caches import layer_specs

log = logging.getLogger(__name__)


def log_one_group(group: Any, version: str) -> None:
    """Log once, at the start, that a window is kept as all tokens are, and what to do about it."""
    specs = layer_specs(group).values()
    if not any(_keeps_more_than_its_window(spec) for spec in specs):
        return
    log.info(
        "layers with a sliding window keep all tokens here, in vLLM and in lwkv: %s",
        "start vLLM without --disable-hybrid-kv-cache-manager to keep their windows alone"
        if can_have_groups(version)
        else f"vLLM {version} has one group of KV caches beside a connector; lwkv keeps windows alone from "
        f"vLLM {'.'.join(map(str, OLDEST))} on",
    )


def _keeps_more_than_its_window(spec: Any) -> bool:
    return type(spec).__name__ == "FullAttentionSpec" and bool(getattr(spec, "sliding_window", None))
