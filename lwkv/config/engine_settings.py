"""Settings that only one serving engine has: their names, so that another part can say where they belong."""

from __future__ import annotations

from typing import NamedTuple


class Engine(NamedTuple):
    """A serving engine, where its user writes lwkv's settings, and the module whose `Settings` reads them."""

    name: str
    place: str
    module: str


VLLM = Engine("vLLM", "kv_connector_extra_config", "lwkv.integrations.vllm.settings")
SGLANG = Engine("SGLang", "linker_extra_config", "lwkv.integrations.sglang.settings")
ENGINE_SETTINGS = {
    "on_load_failure": VLLM,
    "prefetch_waiting": VLLM,
    "load_when": VLLM,
    "blend_in_parts": VLLM,
    "blend_more_while_loading": VLLM,
    "blend_shared_prefix": VLLM,
    "on_flush": SGLANG,
}
