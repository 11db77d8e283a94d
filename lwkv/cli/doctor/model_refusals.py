"""What the engine would refuse of a model whose layers keep different things, by its configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator

from lwkv.config.settings import Config
from lwkv.integrations.sglang.settings import Settings as SGLangSettings
from lwkv.integrations.vllm.hybrid.refusals import can_have_groups, refusal, settings_problems
from lwkv.kinds.model_config import ModelKinds

LOCAL_GROUPS = "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE"
"""vLLM's variable that has chunked local attention in a group of its own; by default all is in one."""


def find_refusals(model: ModelKinds, config: Config, version: str | None) -> Iterator[str]:
    """A text for each thing that the engine would refuse at its start; vLLM, where `config` is not SGLang's.

    Args:
        version: of the vLLM that is installed; None looks at it as at the newest one.
    """
    has_states = bool(model.others)
    if isinstance(config, SGLangSettings):
        beside = [kind.name for kind in model.kinds if kind.form != "full"] + list(model.others)
        if beside:
            yield f"layers keep {', '.join(beside)}; in SGLang lwkv moves full attention only: leave lwkv out"
    elif model.not_cached:
        yield (
            f"layers of {' and '.join(model.not_cached)} keep states that lwkv does not cache; leave lwkv "
            "out for this model"
        )
    elif has_states and not can_have_groups(version or ""):
        yield f"vLLM {version} does not start a model with states beside a connector; use vLLM 0.32 or newer"
    elif has_several_groups(model, version) and (problems := settings_problems(config)):
        yield refusal(problems, has_states)


def has_several_groups(model: ModelKinds, version: str | None) -> bool:
    """Whether this vLLM would have the model's layers in several groups of caches."""
    if not can_have_groups(version or ""):
        return False
    is_local = any(kind.form == "local" for kind in model.kinds)
    if is_local and os.environ.get(LOCAL_GROUPS, "0") != "1":
        return False
    return bool(model.others) or len(model.kinds) > 1
