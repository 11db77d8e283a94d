"""What vLLM runs at its start where lwkv is installed, in every process."""

from __future__ import annotations

import sys
from contextlib import suppress

from lwkv.integrations.vllm.blending.model.model_finder import watch
from lwkv.integrations.vllm.command_line import check_command_line

NAME = "LWKVConnector"


def register() -> None:
    """Make `"kv_connector": "LWKVConnector"` known to vLLM, without a module path. May be called again.

    Raises ConfigError: the command line has settings for it that cannot be used.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # it is registered
        KVConnectorFactory.register_connector(NAME, "lwkv.integrations.vllm", NAME)
    watch()  # for blending, which calls the model's layers
    check_command_line(sys.argv, NAME)
