"""A look at `vllm serve`'s command line before a model is loaded, where a wrong setting costs no time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from lwkv.integrations.vllm.settings import check_role, read_settings
from lwkv.storage.registry import check_urls

OPTION = "--kv-transfer-config"


def check_command_line(arguments: Sequence[str], connector: str) -> None:
    """Read the settings that `arguments` have for `connector`, also for one inside another connector.

    Only JSON is looked at; what is given otherwise is checked when the connector is made.

    Raises:
        ConfigError: as `read_settings`, `check_role` and `check_urls`.
    """
    for text in _values(arguments):
        for transfer in _connectors(text):
            extra = transfer.get("kv_connector_extra_config") or {}
            if transfer.get("kv_connector") == connector and isinstance(extra, Mapping):
                role = transfer.get("kv_role")
                settings = read_settings(extra)
                check_role(role if isinstance(role, str) else None, settings)
                check_urls(settings)


def _values(arguments: Sequence[str]) -> Iterator[str]:
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == OPTION:
            yield from [value] if equals else arguments[place + 1 : place + 2]


def _connectors(text: str) -> Iterator[Mapping[str, object]]:
    """What is configured, outermost first; nothing of what is no JSON, which vLLM itself refuses."""
    try:
        found = [json.loads(text)]
    except ValueError:
        return
    while found:
        transfer = found.pop(0)
        if isinstance(transfer, Mapping):
            yield transfer
            extra = transfer.get("kv_connector_extra_config")
            inner = extra.get("connectors") if isinstance(extra, Mapping) else None
            found += inner if isinstance(inner, list) else []
