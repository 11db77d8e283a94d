from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lwkv.errors import ConfigError
from lwkv.integrations.vllm.hybrid.groups import read_groups


class FullAttentionSpec(SimpleNamespace):
    """Named as vLLM's."""


class SlidingWindowSpec(SimpleNamespace):
    """Named as vLLM's."""


class ChunkedLocalAttentionSpec(SimpleNamespace):
    """Named as vLLM's."""


class MambaSpec(SimpleNamespace):
    """Named as vLLM's."""


class OtherSpec(SimpleNamespace):
    """Of a kind that is not known."""


def full(block_size: int = 16, **more: Any) -> Any:
    common = {"num_kv_heads": 2, "real_page_size_bytes": 512, "dtype": torch.bfloat16}
    return FullAttentionSpec(**{"block_size": block_size, "sliding_window": None} | common | more)


def window(span: int = 64, **more: Any) -> Any:
    common = {"num_kv_heads": 2, "real_page_size_bytes": 512, "dtype": torch.bfloat16}
    return SlidingWindowSpec(**{"block_size": 16, "sliding_window": span} | common | more)


def state(**more: Any) -> Any:
    common = {"shapes": ((2, 8), (4,)), "dtypes": (torch.float32, torch.bfloat16), "mamba_type": "GDN_ATTN"}
    own = {"mamba_cache_mode": "align", "real_page_size_bytes": 72, "tokens_per_state": -1}
    return MambaSpec(**{"block_size": 48, "num_speculative_blocks": 0} | common | own | more)


def config(*groups: tuple[Any, list[str]], **more: Any) -> Any:
    made = [SimpleNamespace(kv_cache_spec=spec, layer_names=names) for spec, names in groups]
    return SimpleNamespace(kv_cache_groups=made, **more)


def test_groups_of_equal_spec_are_one_kind() -> None:
    found = read_groups(config((window(), ["a", "b"]), (full(), ["c", "d"]), (window(), ["e", "f"])), 256)
    assert [kind.name for kind in found.kinds] == ["window-64", "full"]
    assert [kind.num_layers for kind in found.kinds] == [4, 2]
    assert found.kind_of == (0, 1, 0)
    assert (found.chunk_size.tokens, found.most_looked_back) == (256, 64)


def test_windows_of_other_widths_are_other_kinds() -> None:
    found = read_groups(config((window(64), ["a"]), (window(128), ["b"]), (full(), ["c"])), 256)
    assert found.kind_of == (0, 1, 2)
    assert found.most_looked_back == 128


def test_chunked_local_attention_looks_back_to_its_own_part() -> None:
    heads = {"num_kv_heads": 2, "real_page_size_bytes": 512, "dtype": torch.bfloat16, "block_size": 16}
    local = ChunkedLocalAttentionSpec(**heads, attention_chunk_size=8192)
    found = read_groups(config((local, ["a"]), (full(), ["b"])), 256)
    assert [kind.name for kind in found.kinds] == ["local-8192", "full"]
    assert found.most_looked_back == 8192


def test_the_log_line_says_what_each_kind_keeps() -> None:
    found = read_groups(config((window(), ["a", "b"]), (full(), ["c"]), (window(), ["d", "e"])), 250)
    assert found.words() == (
        "this model has 3 groups of 2 kinds of KV caches. window-64: 4 layers, blocks of 16 tokens with 512 "
        "bytes a layer, 128 bytes a token, at most 8 KiB where a prompt can go on; full: 1 layer, blocks of "
        "16 tokens with 512 bytes a layer, 32 bytes a token, of all tokens. chunks have 256 tokens instead "
        "of the configured 250: this model's blocks need a multiple of 16"
    )


def test_a_full_layer_that_names_a_window_keeps_all_tokens() -> None:
    found = read_groups(config((full(sliding_window=64), ["a"]), (window(), ["b"])), 256)
    assert [kind.form for kind in found.kinds] == ["full", "window"]


@pytest.mark.parametrize(
    ("configured", "alignment", "tokens"), [(256, None, 288), (256, 48, 288), (256, 96, 288), (1, 32, 96)]
)
def test_chunks_are_whole_blocks_of_all_groups_and_whole_hits_of_vllm_s(
    configured: int, alignment: int | None, tokens: int
) -> None:
    groups = (full(48), ["a"]), (window(block_size=32), ["b"])
    found = read_groups(config(*groups, cache_hit_alignment_tokens=alignment), configured)
    assert found.chunk_size.tokens == tokens
    assert str(tokens) in found.words()


def test_layers_that_share_the_kv_of_another_one_do_not_count() -> None:
    caches = {name: torch.zeros(4) for name in "abc"}
    caches["d"] = caches["a"]
    found = read_groups(config((full(), ["a", "b", "d"]), (window(), ["c"])), 64, caches)
    assert [kind.num_layers for kind in found.kinds] == [2, 1]


def test_states_have_chunks_of_one_block_of_all_groups() -> None:
    found = read_groups(config((full(), ["a"]), (state(), ["b"]), (state(), ["c"])), 256)
    assert [(kind.form, kind.num_layers) for kind in found.kinds] == [("full", 1), ("state", 2)]
    assert (found.has_states, found.chunk_size.tokens) == (True, 48)
    assert "48 tokens instead of the configured 256" in found.words()
    assert "steps end" in found.words()
    assert not read_groups(config((full(), ["a"]), (window(), ["b"])), 256).has_states


@pytest.mark.parametrize(("num_bytes", "worth"), [(16, 1), (17, 2), (8000, 500)])
def test_a_state_is_worth_the_tokens_of_as_much_full_attention(num_bytes: int, worth: int) -> None:
    """A token is 32 bytes, in one layer; two layers have states."""
    states = [(state(real_page_size_bytes=num_bytes), [name]) for name in "bc"]
    assert read_groups(config((full(), ["a"]), *states), 256).state_worth == worth


def test_layers_that_differ_in_their_state_are_other_kinds() -> None:
    others = [
        state(shapes=((8, 2), (4,))),
        state(mamba_type="SHORT_CONV"),
        state(dtypes=(torch.float32,) * 2),
    ]
    found = read_groups(config(*((spec, [str(i)]) for i, spec in enumerate([full(), state(), *others]))), 256)
    assert found.kind_of == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"mamba_cache_mode": "none"}, "--enable-prefix-caching"),
        ({"mamba_type": SimpleNamespace(name="MAMBA2")}, "states of MAMBA2"),
        ({"num_speculative_blocks": 2}, "several states in a step"),
        ({"num_prefill_checkpoint_blocks": 1}, "several states in a step"),
    ],
)
def test_states_that_cannot_be_found_again_are_refused(more: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as error:
        read_groups(config((full(), ["a"]), (state(**more), ["b"])), 256)
    assert "--disable-hybrid-kv-cache-manager" not in str(error.value)


def test_layers_of_unknown_kinds_are_refused_by_name() -> None:
    groups = (full(), ["attn"]), (OtherSpec(block_size=16), ["m.0", "m.1", "m.2", "m.3", "m.4"])
    with pytest.raises(ConfigError, match=r"layers 'm.0', 'm.1', 'm.2' and 2 more keep a OtherSpec") as error:
        read_groups(config(*groups), 256)
    assert "leave lwkv out" in str(error.value)
    assert "--disable-hybrid-kv-cache-manager" not in str(error.value)


@pytest.mark.parametrize(
    ("spec", "more", "text"),
    [
        (window(extra_retained_tokens=2), {}, "keep tokens behind their window"),
        (full(attention_chunk_size=32), {}, "own part of a prompt"),
        (full(tokens_per_state=4), {}, "one row for several tokens"),
        (full(), {"prefix_cacheable_group_ids": (1,)}, "not found again"),
        (SimpleNamespace(kv_cache_specs={"a": full(), "b": full(32)}), {}, "differ within one group"),
    ],
)
def test_what_is_not_handled_is_refused_by_name(spec: Any, more: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as error:
        read_groups(config((spec, ["a", "b"]), (window(), ["c"]), **more), 256)
    assert "layers 'a', 'b'" in str(error.value)
    assert "--disable-hybrid-kv-cache-manager" in str(error.value)


@pytest.mark.parametrize("flag", ["is_eagle_group", "host_resident"])
def test_groups_of_other_purposes_are_refused(flag: str) -> None:
    both = config((full(), ["a"]), (window(), ["b"]))
    setattr(both.kv_cache_groups[1], flag, True)
    with pytest.raises(ConfigError, match="layers 'b'"):
        read_groups(both, 256)
