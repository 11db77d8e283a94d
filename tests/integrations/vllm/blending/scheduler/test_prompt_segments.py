"""Which parts of a prompt are segments."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from lwkv.blend.segments import Separator
from lwkv.integrations.vllm.blending.scheduler.prompt_segments import MOST_SEGMENTS, PromptSegments


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def request(text: str, **more: Any) -> Any:
    values = {"request_id": "one", "kv_transfer_params": None, "sampling_params": object()} | more
    ids = encode(text)
    return SimpleNamespace(prompt_token_ids=ids, num_prompt_tokens=len(ids), **values)


FINDS = PromptSegments(Separator(encode, "##"))


def test_separators_cut_a_prompt_and_its_end_is_the_question() -> None:
    assert FINDS.of(request("head##one##two##question")) == ((0, 4), (6, 9), (11, 14))


def test_what_the_request_says_counts_more() -> None:
    params = {"lwkv_segments": [[1, 3], [4, 9]]}
    assert FINDS.of(request("head##one##two", kv_transfer_params=params)) == ((1, 3), (4, 9))
    assert FINDS.of(request("head##one##two", kv_transfer_params={"lwkv_segments": []})) == ()
    assert FINDS.of(request("head##one", kv_transfer_params={"other": 1})) == ((0, 4),)


def test_without_a_tokenizer_only_that_counts() -> None:
    finds = PromptSegments(None)
    assert finds.of(request("head##one##two")) == ()
    assert finds.of(request("head", kv_transfer_params={"lwkv_segments": [[0, 2]]})) == ((0, 2),)


@pytest.mark.parametrize("wrong", ["1-3", [[3, 1]], [[0, 99]], [[0, 2], [1, 3]], [[0.5, 1]], {"a": 1}])
def test_a_wrong_list_is_logged_and_nothing_is_blended(wrong: Any, caplog: pytest.LogCaptureFixture) -> None:
    finds = PromptSegments(None)
    with caplog.at_level(logging.WARNING):
        assert finds.of(request("head", kv_transfer_params={"lwkv_segments": wrong})) == ()
    assert "lwkv_segments of request one" in caplog.text


@pytest.mark.parametrize("wrong", ["text", ["lwkv_segments"], 5, 0.5])
def test_parameters_that_are_no_object_are_logged(wrong: Any, caplog: pytest.LogCaptureFixture) -> None:
    """What a client gives in `vllm_xargs` comes as it is."""
    with caplog.at_level(logging.WARNING):
        assert PromptSegments(None).of(request("head", kv_transfer_params=wrong)) == ()
    assert "kv_transfer_params of request one" in caplog.text


def test_a_prompt_of_too_many_segments_is_not_blended(caplog: pytest.LogCaptureFixture) -> None:
    """Each is looked for in every step while its prompt waits, by the thread that all requests wait for."""
    text = "a##" * (MOST_SEGMENTS + 1)
    parts = [[3 * n, 3 * n + 1] for n in range(MOST_SEGMENTS + 1)]
    for given in (None, {"lwkv_segments": parts}):
        finds = PromptSegments(Separator(encode, "##"))
        with caplog.at_level(logging.WARNING):
            assert finds.of(request(text + "b", kv_transfer_params=given)) == ()
        assert f"{MOST_SEGMENTS + 1} segments" in caplog.text
        caplog.clear()
    given = {"lwkv_segments": parts[1:]}
    assert len(FINDS.of(request(text, kv_transfer_params=given))) == MOST_SEGMENTS


@pytest.mark.parametrize(
    "more",
    [
        {"lora_request": object()},
        {"mm_features": [object()]},
        {"prompt_embeds": object()},
        {"sampling_params": None},
        {"resumable": True},
    ],
    ids=lambda more: next(iter(more)),
)
def test_requests_that_depend_on_more_than_their_tokens_are_not_blended(more: dict[str, Any]) -> None:
    assert FINDS.of(request("head##one##two", **more)) == ()
