"""What vLLM runs at its start where lwkv is installed, in every process."""

from __future__ import annotations

from contextlib import suppress

NAME = "LWKVConnector"


def register() -> None:
    """Make `"kv_connector": "LWKVConnector"` known to vLLM, without a module path. May be called again."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # it is registered
        KVConnectorFactory.register_connector(NAME, "lwkv.integrations.vllm", NAME)
