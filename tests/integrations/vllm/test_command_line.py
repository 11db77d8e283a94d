from __future__ import annotations

import json

import pytest

from lwkv.errors import ConfigError
from lwkv.integrations.vllm.command_line import check_command_line

NAME = "LWKVConnector"


def transfer(connector: str = NAME, **extra: object) -> dict[str, object]:
    return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}


@pytest.mark.parametrize(
    "form", ["--kv-transfer-config {}", "--kv-transfer-config={}", "--kv_transfer_config={}"]
)
@pytest.mark.parametrize("inside", [False, True])
def test_a_wrong_setting_is_refused_before_a_model_is_loaded(form: str, inside: bool) -> None:
    given = transfer(chunksize=4)
    if inside:
        given = transfer("MultiConnector", connectors=[transfer("Other", chunksize=4), given])
    arguments = [
        "serve",
        "model",
        *(part.format(json.dumps(given)) for part in form.split(" ")),
        "--port",
        "1",
    ]
    with pytest.raises(ConfigError, match=r"chunksize: got 4 .*did you mean chunk_size\?"):
        check_command_line(arguments, NAME)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("reddis://h:1", r"did you mean redis\?"),
        ("redis://h:port", "from 1 to 65535"),
        ("redis://h?tls=yes", "there is no option 'tls'"),
        ("mooncake://h?replicas=none", "replicas is 'none'"),
    ],
)
def test_a_remote_url_that_cannot_work_is_refused_too(url: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"remote_url.*{text}"):
        check_command_line(["--kv-transfer-config", json.dumps(transfer(remote_url=url))], NAME)


def test_a_role_that_cannot_work_is_refused_too() -> None:
    given = json.dumps(transfer() | {"kv_role": "kv_consumer"})
    with pytest.raises(ConfigError, match="kv_role: got 'kv_consumer'"):
        check_command_line(["--kv-transfer-config", given], NAME)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["serve", "model"],
        ["--kv-transfer-config"],
        ["--kv-transfer-config", "{no json"],
        ["--kv-transfer-config", "[1, null]"],
        ["--kv-transfer-config", json.dumps(transfer("Other", chunksize=4))],
        ["--kv-transfer-config", json.dumps(transfer(chunk_size=4))],
        ["--kv-transfer-config", json.dumps({"kv_connector": NAME, "kv_connector_extra_config": [1]})],
        ["--kv-transfer-config", json.dumps(transfer("MultiConnector", connectors={"a": 1}))],
    ],
)
def test_what_is_right_or_not_lwkv_s_is_left_to_vllm(arguments: list[str]) -> None:
    check_command_line(arguments, NAME)
