from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lwkv.integrations.vllm.hybrid.one_group import log_one_group


class FullAttentionSpec(SimpleNamespace):
    """Named as vLLM's."""


class SlidingWindowSpec(SimpleNamespace):
    """Named as vLLM's."""


def group(spec: Any) -> Any:
    return SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"])


@pytest.mark.parametrize(
    ("version", "advice"), [("0.22.1", "from vLLM 0.32 on"), ("0.32.0", "without --disable-hybrid")]
)
def test_windows_that_are_kept_whole_are_named_with_what_to_do(
    version: str, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    log_one_group(group(FullAttentionSpec(sliding_window=64)), version)
    assert advice in caplog.text


@pytest.mark.parametrize(
    "spec", [FullAttentionSpec(sliding_window=None), SlidingWindowSpec(sliding_window=64)]
)
def test_nothing_is_said_of_layers_that_keep_what_they_need(
    spec: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    log_one_group(group(spec), "0.32.0")
    assert not caplog.text
