"""What the other tests assert fails for connectors that are wrong, each in one way."""

from __future__ import annotations

from pathlib import Path

import pytest
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import assert_same, prompt, started, with_lwkv


@pytest.mark.parametrize(
    ("connector", "right_hits", "right_answers"),
    [
        ("NeverHits", False, True),
        ("Garbage", True, False),
        ("OneBlock", True, False),
        ("AfterUse", True, False),
    ],
)
def test_a_wrong_connector_is_told_by_its_hits_or_by_its_answers(
    llama: Path, plain: Elsewhere, connector: str, right_hits: bool, right_answers: bool
) -> None:
    arguments = with_lwkv()
    arguments["kv_transfer_config"] |= {
        "kv_connector": connector,
        "kv_connector_module_path": "integrations.in_vllm.bad_connectors",
    }
    prompts = [prompt(500, 300)]
    with started(llama, enable_prefix_caching=False, **arguments) as engine:
        assert_same(engine.ask(prompts), plain.ask(prompts))
        engine.new_hits()
        again = engine.ask(prompts)
        assert (engine.new_hits() == 256) == right_hits
    if right_answers:
        assert_same(again, plain.ask(prompts))
    else:
        with pytest.raises(AssertionError):
            assert_same(again, plain.ask(prompts))
