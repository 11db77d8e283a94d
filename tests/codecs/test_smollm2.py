"""Lossless pages of a real model's KV, where the model is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from demo_model import needs_smollm2
from page_coders import decoded, encoded

from lwkv.codecs.lossless_form import LosslessForm
from lwkv.codecs.torch_lossless import TorchLossless
from lwkv.config.settings import Config
from lwkv.platforms import Platform
from lwkv.reference import (
    QUESTIONS,
    Model,
    PagedCache,
    Prompt,
    ReferenceEngine,
    Tokenizer,
    document_prompt,
    generate,
    load_smollm2,
)
from lwkv.reference.connect import open_cache_engine
from lwkv.steps import LayerSteps

CHUNK = 256


@pytest.fixture
def smollm2(device: torch.device) -> tuple[Model, Tokenizer]:
    return load_smollm2(device=device, dtype=torch.bfloat16)


def answers(model: Model, tokenizer: Tokenizer, codec: str, platform: Platform) -> dict[str, Any]:
    """The first tokens of two answers, the second of which loads what the first has stored."""
    cache = PagedCache(model.shape, num_blocks=100, dtype=model.dtype, device=model.device)
    config = Config(page_codec=codec, use_layerwise=True, max_local_cpu_size=0.2)
    with open_cache_engine(config, model, cache, "smollm2", platform=platform) as lwkv:
        engine = ReferenceEngine(model, cache, steps=LayerSteps(lwkv), lookup=lwkv.lookup)
        # Its beginning, twice, with an end of its own.
        prompt = tokenizer.encode(document_prompt(next(iter(QUESTIONS))))[: 2 * CHUNK + 20]
        prompts = [prompt, [*prompt[:-5], *prompt[:5]]]
        tokens = []
        for prompt in prompts:
            tokens.append(generate(engine, [Prompt(prompt, 3, tokenizer.stop_tokens)])[0].tokens)
            assert lwkv.flush()
        stats = lwkv.stats()
        return {
            "tokens": tokens,
            "retrieved": stats["tokens_retrieved"],
            "not coded": stats.get("chunks_not_coded", 0),
            "cache": [tensor.view(torch.int16).clone() for tensor in _tensors(cache)],
            "page_bytes": lwkv.connector.page_bytes,
            "rows": [
                [view.reshape(-1, view.shape[-1]).clone() for view in (layer.k, layer.v) if view is not None]
                for layer in lwkv.connector.layers
            ],
        }


def _tensors(cache: PagedCache) -> list[torch.Tensor]:
    tensors = cache.tensors
    return list(tensors.values()) if isinstance(tensors, dict) else list(tensors)


@pytest.mark.slow
@needs_smollm2
def test_answers_and_every_bit_of_the_cache_are_those_of_raw_pages(
    smollm2: tuple[Model, Tokenizer], platform: Platform
) -> None:
    raw, lossless = (answers(*smollm2, codec, platform) for codec in ("raw", "lossless"))
    assert raw["retrieved"] == lossless["retrieved"] == 2 * CHUNK
    assert lossless["not coded"] == 0
    assert raw["tokens"] == lossless["tokens"]
    assert all(torch.equal(a, b) for a, b in zip(raw["cache"], lossless["cache"], strict=True))
    assert lossless["page_bytes"] / raw["page_bytes"] < 0.775
    # There is room for 1 in 64.
    assert max(_escapes(bits) for layer in raw["rows"] for bits in layer) < 1 / 256


def _escapes(rows: torch.Tensor) -> float:
    """The share of elements, int16 (rows, width), that are escapes; rows never written have none."""
    rows = rows.cpu()
    form = LosslessForm(len(rows), rows.shape[1])
    coded = encoded(TorchLossless(form), rows.view(torch.uint8).view(1, -1))
    assert torch.equal(decoded(TorchLossless(form), coded).view(-1), rows.view(torch.uint8).view(-1))
    written = int((rows != 0).any(1).sum()) * rows.shape[1]
    return int(coded[0, 20:24].view(torch.int32)) / max(written, 1)
