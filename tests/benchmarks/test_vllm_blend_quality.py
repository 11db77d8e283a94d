"""How blends in vLLM are compared with lwkv's own, without a vLLM."""

from __future__ import annotations

import numpy as np
import pytest

from lwkv.benchmarks.blending.tasks import needle
from lwkv.benchmarks.vllm_blend_quality import asked, divergences, table, ways


def test_a_prompt_has_its_documents_where_its_segments_are() -> None:
    def encode(text: str) -> list[int]:
        return [ord(character) for character in text]

    task = needle(3)
    prompt = asked(encode, "needles", task)
    assert prompt.documents() == [encode(document) for document in task.documents]
    assert "".join(map(chr, prompt.ids)).endswith(task.opening)


def test_divergences_are_those_from_the_full_prefill() -> None:
    full, other = np.log([0.5, 0.5]), np.log([0.25, 0.75])
    found = divergences({"other": other, "full": full, "same": full.copy()})
    assert found == {"other": pytest.approx(0.5 * np.log(4 / 3)), "same": 0.0}


def test_the_table_has_means_of_each_kind_and_their_ratio() -> None:
    own, there = [{"query": 0.1}, {"query": 0.3}, {"query": 1.0}], [{"query": 0.2}] * 2 + [{"query": 0.5}]
    lines = table(["needles", "needles", "two hops"], own, there).splitlines()
    assert lines[2:] == [
        "| needles | query | 0.2000 | 0.2000 | 1.000 |",
        "| two hops | query | 1.0000 | 0.5000 | 0.500 |",
    ]


def test_every_selector_is_compared() -> None:
    assert len({type(selector) for selector, _ in ways(30).values()}) == 4
