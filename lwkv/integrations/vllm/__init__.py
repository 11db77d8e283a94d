"""lwkv as a KV connector of vLLM: `"kv_connector_module_path": "lwkv.integrations.vllm"`.

vLLM makes one connector in its scheduler and one in each worker. They share no memory: the scheduler's half
(`scheduler.py`) decides what is loaded and stored and sends orders, a worker's half (`worker.py`) carries
them out and sends reports. Only `connector.py`, `statistics.py`, `events.py` and `versions.py` know vLLM's
classes, and `failed_loads.py` some methods of its scheduler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lwkv.integrations.vllm.connector import LWKVConnector

__all__ = ["LWKVConnector"]


def __getattr__(name: str) -> object:
    # vLLM takes the class from here; the parts beside it can be used, and tested, without vLLM.
    if name == "LWKVConnector":
        from lwkv.integrations.vllm.connector import LWKVConnector

        return LWKVConnector
    raise AttributeError(f"{__name__} has no {name!r}; it has {', '.join(__all__)}")
