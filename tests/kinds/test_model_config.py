"""The kinds of a model by its configuration, as transformers has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lwkv.errors import ConfigError
from lwkv.kinds import Kind
from lwkv.kinds.model_config import UnknownLayersError, read_model


def config(**more: Any) -> SimpleNamespace:
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
    return SimpleNamespace(**sizes | {"dtype": "torch.bfloat16"} | more)


def test_a_model_without_types_of_layers_keeps_all_tokens() -> None:
    found = read_model(config(), 16)
    assert found.kinds == (Kind("full", 16, 4, 16 * 2 * 2 * 32 * 2, ("bfloat16",)),)
    assert found.others == {}


@pytest.mark.parametrize(("use", "form"), [(None, "window"), (True, "window"), (False, "full")])
def test_a_window_counts_where_it_is_used(use: bool | None, form: str) -> None:
    more = {} if use is None else {"use_sliding_window": use}
    (kind,) = read_model(config(sliding_window=64, **more), 16).kinds
    assert (kind.form, kind.span) == (form, 64 if form == "window" else 0)


def test_layers_of_a_type_are_a_kind_and_layers_that_share_kv_keep_nothing() -> None:
    types = ["sliding_attention", "chunked_attention", "full_attention", "sliding_attention"] * 2
    windows = {"sliding_window": 64, "attention_chunk_size": 96}
    every = config(num_hidden_layers=8, layer_types=types, head_dim=64, **windows)
    kinds = read_model(every, 32).kinds
    assert [(kind.name, kind.num_layers) for kind in kinds] == [
        ("window-64", 4),
        ("local-96", 2),
        ("full", 2),
    ]
    assert {kind.block_bytes for kind in kinds} == {32 * 2 * 2 * 64 * 2}
    every.num_kv_shared_layers = 3
    assert [kind.num_layers for kind in read_model(every, 32).kinds] == [3, 1, 1]


def test_layers_with_states_are_counted_by_their_name() -> None:
    found = read_model(config(layer_types=["linear_attention"] * 3 + ["full_attention"], dtype=None), 16)
    assert [kind.num_layers for kind in found.kinds] == [1]
    assert found.others == {"linear_attention": 3}

    assert found.not_cached == ("linear_attention",)


@pytest.mark.parametrize(
    ("name", "field"), [("linear_attention", "linear_key_head_dim"), ("conv", "conv_L_cache")]
)
def test_states_that_are_cached_are_known_by_a_field_that_goes_with_them(name: str, field: str) -> None:
    types = [name, "full_attention"] * 2
    assert read_model(config(layer_types=types, **{field: 4}), 16).not_cached == ()
    assert read_model(config(layer_types=types), 16).not_cached == (name,)
    assert read_model(config(layer_types=[name, "mamba"] * 2, **{field: 4}), 16).not_cached == ("mamba",)


def test_older_names_of_layers_are_read_too_and_those_without_a_cache_left_out() -> None:
    found = read_model(config(layers_block_type=["mamba", "attention", "moe", "mlp"]), 16)
    assert [kind.num_layers for kind in found.kinds] == [1]
    assert (found.others, found.not_cached) == ({"mamba": 1}, ("mamba",))


def test_what_no_engine_caches_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"index_head_dim: got 128; .* leave lwkv out") as error:
        read_model(config(index_head_dim=128, kv_lora_rank=512), 16)
    assert not isinstance(error.value, UnknownLayersError)
    with pytest.raises(ConfigError, match="num_attention_heads: there is none") as error:
        read_model(SimpleNamespace(num_hidden_layers=4), 16)
    assert not isinstance(error.value, UnknownLayersError)
    with pytest.raises(ConfigError, match="num_hidden_layers: there is none"):
        read_model(SimpleNamespace(), 16)


@pytest.mark.parametrize("name", ["global_head_dim", "kv_lora_rank"])
def test_a_model_whose_layers_differ_in_their_heads_is_not_guessed_at(name: str) -> None:
    with pytest.raises(UnknownLayersError, match=f"{name}: got 512; .* when the engine starts"):
        read_model(config(**{name: 512}), 16)
