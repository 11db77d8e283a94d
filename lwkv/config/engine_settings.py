"""Settings that only one serving engine has: their names, so that another part can say where they belong."""

from __future__ import annotations

from typing import NamedTuple


class Engine(NamedTuple):
    """A serving engine, and where its user writes lwkv's settings."""

    name: str
    place: str


VLLM = Engine("vLLM", "kv_connector_extra_config")
SGLANG = Engine("SGLang", "linker_extra_config")
ENGINE_SETTINGS = {
    "on_load_failure": VLLM,
    "prefetch_waiting": VLLM,
    "load_when": VLLM,
    "on_flush": SGLANG,
}
