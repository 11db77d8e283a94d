"""In a real SGLang pages of one salt, extra key or adapter are never taken for those of another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.in_sglang.prompts import DOCUMENTS
from integrations.in_sglang.rig import Answer, Engine, started, with_lwkv
from integrations.in_sglang.test_engines import WHOLE
from integrations.in_vllm.models import SIZES
from safetensors.torch import save_file

PROMPT = DOCUMENTS[0][0]
NAMES = ("", "one", "two")
"""No adapter, and two of the same shape."""
MENDED = """
import functools, torch

def unpinned(make):
    @functools.wraps(make)
    def without(*arguments, pin_memory=False, **named):
        return make(*arguments, **named)
    return without

for name in ("tensor", "empty", "zeros"):
    setattr(torch, name, unpinned(getattr(torch, name)))
torch.Tensor.pin_memory = lambda tensor, *_: tensor
"""
"""What Python runs at its start: SGLang wants page-locked memory for adapters, which torch has for GPUs."""
REQUESTS: list[dict[str, Any]] = [
    {},
    {"cache_salt": "one"},
    {"cache_salt": "two"},
    {"extra_key": "one"},
    {"extra_key": "two"},
    {"extra_key": "one", "cache_salt": "two"},
    {"lora_path": "one"},
    {"lora_path": "two"},
    {"lora_path": "two", "cache_salt": "two"},
]


def write_adapter(folder: Path, seed: int) -> Path:
    """A LoRA of rank 4 for q, k and v of every layer of the tests' model."""
    random, tensors = torch.Generator().manual_seed(seed), {}
    hidden, heads = SIZES["hidden_size"], SIZES["head_dim"]
    widths = {"q": SIZES["num_attention_heads"], "k": SIZES["num_key_value_heads"]}
    widths["v"] = widths["k"]
    for layer in range(SIZES["num_hidden_layers"]):
        for name, count in widths.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj"
            tensors[f"{place}.lora_A.weight"] = torch.randn(4, hidden, generator=random)
            tensors[f"{place}.lora_B.weight"] = torch.randn(count * heads, 4, generator=random)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 4,
        "bias": "none",
        "target_modules": [f"{name}_proj" for name in widths],
    }
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("adapters")
    return [f"{name}={write_adapter(folder / name, seed)}" for seed, name in enumerate(NAMES) if name]


@pytest.fixture(scope="module")
def computed(
    llama: Path, adapters: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, list[Answer]]]:
    """An engine, and what it answered to the same prompt, each time for the first time of such a request."""
    mended = tmp_path_factory.mktemp("mended")
    (mended / "sitecustomize.py").write_text(MENDED)
    lora = {"lora_paths": adapters, "lora_backend": "torch_native", "max_loras_per_batch": len(NAMES)}
    with started(llama, path=[mended], **lora, **with_lwkv()) as engine:
        yield engine, [engine.ask_one(PROMPT, **request) for request in REQUESTS]


def test_no_request_finds_pages_of_another_kind(computed: tuple[Engine, list[Answer]]) -> None:
    _, answers = computed
    assert [(answer.from_device, answer.from_host) for answer in answers] == [(0, 0)] * len(REQUESTS)


def test_adapters_change_the_answers_and_salts_do_not(computed: tuple[Engine, list[Answer]]) -> None:
    """So that pages of another adapter would be seen in the tests below."""
    plain, one, two = ([0, 1, 2, 3, 4, 5], [6], [7, 8])
    answers = [[tuple(computed[1][i].tokens) for i in those] for those in (plain, one, two)]
    assert [len(set(those)) for those in answers] == [1, 1, 1]
    assert len({those[0] for those in answers}) == 3


def test_every_request_finds_its_own_pages(computed: tuple[Engine, list[Answer]]) -> None:
    engine, answers = computed
    engine.flush()
    for request, answer in zip(REQUESTS, answers, strict=True):
        again = engine.ask_one(PROMPT, **request)
        assert (again.from_device, again.from_host, again.tokens) == (0, WHOLE, answer.tokens), request
    assert "External linker load failed" not in engine.log
