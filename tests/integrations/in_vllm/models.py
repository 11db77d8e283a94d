"""Tiny models of random weights whose answers depend on every token of their KV."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 4,
}


def written(write: Callable[..., Path], folder: Path, *arguments: Any) -> Path:
    """Have a model written by another process: what it imports would confuse vLLM in this one."""
    process = multiprocessing.get_context("spawn").Process(target=write, args=(folder, *arguments))
    process.start()
    process.join()
    assert process.exitcode == 0
    return folder


def write_llama(folder: Path) -> Path:
    """Llama, with two heads of 32 for K and V in each of four layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _write(folder, LlamaForCausalLM(LlamaConfig(**SIZES)))


def write_mistral(folder: Path, window: int) -> Path:
    """Mistral, which looks back `window` tokens."""
    from transformers import MistralConfig, MistralForCausalLM

    return _write(folder, MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window)))


def write_qwen2(folder: Path) -> Path:
    """Qwen2, whose projections have biases."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return _write(folder, Qwen2ForCausalLM(Qwen2Config(**SIZES)))


def write_qwen3(folder: Path) -> Path:
    """Qwen3, which norms each head of q and k, with YaRN."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    }
    return _write(folder, Qwen3ForCausalLM(Qwen3Config(**SIZES | {"rope_parameters": yarn})))


def write_qwen3_moe(folder: Path) -> Path:
    """Qwen3 with four experts a layer, two of which are used."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    }
    return _write(folder, Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | experts)))


def write_gemma(folder: Path, window: int, pattern: str = "wf" * 2) -> Path:
    """Gemma 3, of whose layers those that are "w" in `pattern` look back `window` tokens."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = [{"w": "sliding_attention", "f": "full_attention"}[letter] for letter in pattern]
    layers = {"num_hidden_layers": len(kinds), "layer_types": kinds, "query_pre_attn_scalar": 32}
    return _write(folder, Gemma3ForCausalLM(Gemma3TextConfig(**SIZES | layers, sliding_window=window)))


def write_gpt_oss(folder: Path, window: int, pattern: str = "wf" * 2) -> Path:
    """gpt-oss, as Gemma 3 above: each head has a sink, and each layer four experts, two of which are used."""
    from transformers import GptOssConfig, GptOssForCausalLM

    kinds = [{"w": "sliding_attention", "f": "full_attention"}[letter] for letter in pattern]
    layers = {"num_hidden_layers": len(kinds), "layer_types": kinds, "pad_token_id": 0}
    experts = {"intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = GptOssForCausalLM(GptOssConfig(**SIZES | layers | experts, sliding_window=window))
    torch.manual_seed(2)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if (weights.dim() == 1 and "norm" not in name) or name.endswith("_bias"):
                weights.normal_(0, 0.3)
    return _write(folder, model)


def write_gemma3n(folder: Path, window: int, pattern: str = "wf" * 3) -> Path:
    """Gemma 3n, as Gemma 3 above, whose last two layers look at the KV of earlier ones."""
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    kinds = [{"w": "sliding_attention", "f": "full_attention"}[letter] for letter in pattern]
    layers = {"num_hidden_layers": len(kinds), "layer_types": kinds, "num_kv_shared_layers": 2}
    beside = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 512, "laurel_rank": 16}
    more = {"activation_sparsity_pattern": [0.0] * len(kinds), "tie_word_embeddings": True}
    config = Gemma3nTextConfig(**SIZES | layers | beside | more, sliding_window=window)
    return _write(folder, Gemma3nForCausalLM(config))


def write_llama4(folder: Path, local: int, pattern: str = "lf" * 2) -> Path:
    """Llama 4, of whose layers those that are "l" in `pattern` look back to a multiple of `local` tokens."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    kinds = [{"l": "chunked_attention", "f": "full_attention"}[letter] for letter in pattern]
    layers = {
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "no_rope_layers": [int(letter == "l") for letter in pattern],
        "attention_chunk_size": local,
        "pad_token_id": 0,
    }
    experts = {"intermediate_size_mlp": 256, "num_local_experts": 4, "interleave_moe_layer_step": 2}
    return _write(folder, Llama4ForCausalLM(Llama4TextConfig(**SIZES | layers | experts)))


def write_lfm2(folder: Path) -> Path:
    """LFM2, of whose layers every other one is a short convolution, which keeps a state."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    kinds = ["conv", "full_attention"] * (SIZES["num_hidden_layers"] // 2)
    width = SIZES["hidden_size"]
    convolution = {"conv_L_cache": 3, "conv_dim": width, "conv_dim_out": width}
    sizes = SIZES | convolution | {"block_dim": width, "block_ff_dim": 256, "block_multiple_of": 32}
    # vLLM has the same weights for the tokens that come and for those that go.
    return _write(folder, Lfm2ForCausalLM(Lfm2Config(**sizes, layer_types=kinds)), embedding=0.3)


def write_qwen3_next(folder: Path) -> Path:
    """Qwen3-Next, of whose layers every other one is a gated delta net, which keeps two states."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    kinds = ["linear_attention", "full_attention"] * (SIZES["num_hidden_layers"] // 2)
    nets = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "layer_types": kinds}
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "head_dim": 64}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    more = {"shared_expert_intermediate_size": 64, "norm_topk_prob": True}
    config = Qwen3NextConfig(**SIZES | nets | heads | experts | more)
    return _write(folder, Qwen3NextForCausalLM(config), embedding=1)


def write_deepseek(folder: Path) -> Path:
    """DeepSeek V2 without experts: a latent row of 576 elements for each token (MLA)."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    return _write(folder, DeepseekV2ForCausalLM(DeepseekV2Config(**SIZES | LATENTS)))


def write_eagle(folder: Path, target: Path) -> Path:
    """One layer that drafts for `target`, in EAGLE's way."""
    from safetensors.torch import load_file, save_file

    torch.manual_seed(1)
    config = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(target / "model.safetensors").items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    hidden = SIZES["hidden_size"]
    weights["fc.weight"] = torch.randn(hidden, 2 * hidden) / hidden**0.5
    save_file(weights, folder / "model.safetensors")
    return folder


def _write(folder: Path, model: Any, embedding: float = 10) -> Path:
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() > 1:
                # Large enough that attention looks at single tokens, and the answer at attention.
                weights.normal_(0, embedding if "embed" in name else 1.6 / weights.shape[-1] ** 0.5)
    model.float().save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path) -> Path:
    """Beside a model: a token for every byte, and a template for chats."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {letter: 3 + n for n, letter in enumerate(letters)}
    tokenizer = Tokenizer(BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    each = "[{{ m['role'] }}] {{ m['content'] }}\n"
    fast.chat_template = f"{{% for m in messages %}}{each}{{% endfor %}}[assistant] "
    fast.save_pretrained(folder)
    return folder


def write_talking_llama(folder: Path) -> Path:
    """Llama with that tokenizer."""
    return write_tokenizer(write_llama(folder))
