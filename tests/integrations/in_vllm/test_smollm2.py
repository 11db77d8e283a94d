"""A real model answers the demo's questions the same, cold and with the document loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from integrations.in_vllm import models
from integrations.in_vllm.reference import Elsewhere
from integrations.in_vllm.rig import assert_same, started, with_lwkv

from lwkv.benchmarks.vllm_blend_quality import write_smollm2
from lwkv.reference import GGUFFile, find_smollm2, tokenizer_from_gguf
from lwkv.reference.document import QUESTIONS, document_prompt


def test_smollm2_answers_questions_about_a_document_that_is_loaded(tmp_path: Path) -> None:
    path = find_smollm2()
    assert path is not None
    tokenizer = tokenizer_from_gguf(GGUFFile(path))
    prompts = [tokenizer.encode(document_prompt(question)) for question in QUESTIONS]
    model = models.written(write_smollm2, tmp_path)
    sizes = {"max_model_len": 1280, "kv_cache_memory_bytes": 512 << 20, "enable_prefix_caching": False}
    plain = Elsewhere(model, **sizes)
    try:
        cold = plain.ask(prompts, 14)
    finally:
        plain.close()
    with started(model, **sizes, **with_lwkv()) as engine:
        first = replace(cold[0], tokens=cold[0].tokens[:1], logprobs=cold[0].logprobs[:1])
        assert_same(engine.ask(prompts[:1], 1), [first])
        assert engine.new_hits() == 0
        warm = engine.ask(prompts, 14)
        assert_same(warm, cold)
        assert engine.new_hits() >= len(prompts[0]) // 64 * 64 + 960
    for answer, word in zip(warm, QUESTIONS.values(), strict=True):
        assert word in tokenizer.decode(answer.tokens)
