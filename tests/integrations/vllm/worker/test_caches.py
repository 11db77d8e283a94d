from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lwkv.config.settings import Config
from lwkv.engine import CacheEngine
from lwkv.errors import ConfigError
from lwkv.integrations.vllm.worker.caches import Rank, describe, draft_layers, only_group, window_of
from lwkv.platforms.cpu import CPU

BLOCKS = 6
RANK = Rank(1, 2, 0, 1)


class FullAttentionSpec(SimpleNamespace):
    """Named as vLLM's."""


class SlidingWindowSpec(SimpleNamespace):
    """Named as vLLM's."""


class MLAAttentionSpec(SimpleNamespace):
    """Named as vLLM's."""


class MambaSpec(SimpleNamespace):
    """Named as vLLM's."""


def spec(block_size: int = 16) -> Any:
    return FullAttentionSpec(num_kv_heads=2, head_size=8, block_size=block_size)


def config_of(*groups: Any) -> Any:
    return SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=list(groups))


def group(kind: Any, names: list[str]) -> Any:
    return SimpleNamespace(layer_names=names, kv_cache_spec=kind)


def vllm_config(**parallel: int) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        model_config=SimpleNamespace(
            model="org/model",
            dtype=torch.float32,
            revision=None,
            hf_text_config=SimpleNamespace(rope_theta=1e4),
        ),
    )


def names(number: int) -> list[str]:
    return [f"model.layers.{i}.self_attn.attn" for i in range(number)]


def described(kind: Any, *shape: int, layers: int = 2, **parallel: int) -> Any:
    caches = {name: torch.zeros(shape) for name in names(layers)}
    return describe(vllm_config(**parallel), config_of(group(kind, names(layers))), caches, RANK, "0.32.0")


def test_layers_are_in_the_order_of_their_numbers() -> None:
    shuffled = [f"model.layers.{i}.self_attn.attn" for i in (10, 2, 0, 1)]
    caches = {name: torch.zeros(BLOCKS, 2, 16, 16) for name in shuffled}
    found = describe(vllm_config(), config_of(group(spec(), shuffled)), caches, RANK, "0.32.0")
    assert [name.split(".")[2] for name in found.caches] == ["0", "1", "2", "10"]


@pytest.mark.parametrize(
    ("shape", "parts"),
    [((BLOCKS, 2, 16, 16), 1), ((2, BLOCKS, 2, 16, 8), 2)],
    ids=["K and V of a block together", "in two halves"],
)
def test_blocks_of_the_cpu_s_attention_are_moved_whole(shape: tuple[int, ...], parts: int) -> None:
    found = described(spec(), *shape)
    config = Config(chunk_size=32)
    with CacheEngine.create(
        config, found.metadata, found.caches, layout_hints=found.hints, platform=CPU()
    ) as e:
        assert (e.connector.tokens_per_row, e.num_layers) == (16, 2)
        assert e.connector.layers[0].parts == parts
        assert e.connector.page_bytes == 32 * 2 * 8 * 2 * 4


@pytest.mark.parametrize(
    "shape",
    [(2, BLOCKS, 16, 2, 8), (BLOCKS, 2, 16, 2, 8), (BLOCKS, 2, 16, 16)],
    ids=["until 0.22", "in 0.24", "since 0.26"],
)
def test_caches_of_accelerators_are_moved_row_by_row(shape: tuple[int, ...]) -> None:
    on_device = {name: torch.zeros(shape, device="meta") for name in names(2)}
    found = describe(vllm_config(), config_of(group(spec(), names(2))), on_device, RANK, "0.32.0")
    caches = {name: torch.zeros(shape) for name in found.caches}
    arguments = {"layout_hints": found.hints, "platform": CPU()}
    with CacheEngine.create(Config(chunk_size=32), found.metadata, caches, **arguments) as engine:
        assert (engine.connector.tokens_per_row, engine.connector.num_slots) == (1, 16 * BLOCKS)


def test_a_kernel_may_cut_the_manager_s_blocks() -> None:
    found = described(spec(32), 4 * BLOCKS, 2, 8, 16)
    assert {kv.block_size for kv in found.hints["specs"].values()} == {8}


def test_blocks_of_no_such_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="lacks 6 blocks of 16 tokens"):
        described(spec(), BLOCKS, 2, 17, 12)


def test_latent_rows_are_as_wide_as_the_tensor() -> None:
    kind = MLAAttentionSpec(num_kv_heads=1, head_size=576, block_size=16)
    found = described(kind, BLOCKS, 1, 16, 576)
    assert found.metadata.use_mla
    assert {(kv.head_size, kv.num_kv_heads) for kv in found.hints["specs"].values()} == {(576, 1)}


def test_the_packing_of_the_cpu_s_blocks_is_part_of_the_layout() -> None:
    caches = {name: torch.zeros(BLOCKS, 2, 16, 16) for name in names(1)}
    arguments = (vllm_config(), config_of(group(spec(), names(1))), caches, RANK)
    tags = {describe(*arguments, version).hints["opaque_tag"] for version in ("0.31.0", "0.32.0", "0.32.1")}
    assert len(tags) == 2


@pytest.mark.parametrize("isa", ["vec", "amx", None])
def test_for_single_tokens_the_packing_of_the_cpu_s_blocks_must_be_known(isa: str | None) -> None:
    caches = {name: torch.zeros(BLOCKS, 2, 16, 16) for name in names(1)}
    config = vllm_config()
    layer = SimpleNamespace() if isa is None else SimpleNamespace(isa=isa)
    config.compilation_config = SimpleNamespace(static_forward_context=dict.fromkeys(caches, layer))
    arguments = (config, config_of(group(spec(), names(1))), caches, RANK, "0.32.0")
    for setting in ("enable_blending", "page_codec=lossless"):
        if isa == "vec":
            assert describe(*arguments, setting).hints["layout"] == "vllm_cpu_vec"
        else:
            packed = (
                f"{setting}: the CPU's attention packs its blocks for {isa or 'latent rows'}, and .*leave"
            )
            with pytest.raises(ConfigError, match=packed):
                describe(*arguments, setting)
    assert describe(*arguments).hints["layout"] == "opaque"


def test_a_rank_s_number_is_counted_over_tensor_and_pipeline_parallel() -> None:
    numbers = [Rank(tp, 2, pp, 3).number for pp in range(3) for tp in range(2)]
    assert numbers == [0, 1, 2, 3, 4, 5]


def test_scales_that_are_measured_anew_make_a_cache_of_this_process_alone() -> None:
    caches = {name: torch.zeros(BLOCKS, 2, 16, 16) for name in names(1)}
    config = vllm_config()
    config.cache_config.calculate_kv_scales = True
    arguments = (config, config_of(group(spec(), names(1))), caches, RANK, "0.32.0")
    assert describe(*arguments).metadata.revision != describe(*arguments).metadata.revision


def test_layers_behind_the_model_s_own_are_the_draft_model_s() -> None:
    config = vllm_config()
    config.model_config.hf_text_config.num_hidden_layers = 2
    assert draft_layers(config, names(4)) == []
    config.speculative_config = object()
    assert draft_layers(config, names(4)) == names(4)[2:]


def test_each_layer_s_spec_is_used_where_they_differ() -> None:
    specs = {"layers.0.attn": spec(), "layers.1.attn": spec()}
    found = only_group(config_of(group(SimpleNamespace(kv_cache_specs=specs), list(specs))))
    assert found.layer_names == list(specs)


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([group(spec(), ["a"]), group(spec(), ["b"])], "--disable-hybrid-kv-cache-manager"),
        ([group(MambaSpec(block_size=16), ["mixer"])], "'mixer' keeps a MambaSpec"),
    ],
)
def test_models_that_keep_other_things_than_keys_and_values_are_refused(groups: list[Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        only_group(config_of(*groups))


def test_a_split_along_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="decode_context_parallel_size: got 2"):
        described(spec(), BLOCKS, 2, 16, 16, decode_context_parallel_size=2)


@pytest.mark.parametrize(("key", "value"), [("enable_dbo", True), ("ubatch_size", 2)])
def test_batches_that_are_computed_in_parts_are_refused(key: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{key}: got {value}"):
        described(spec(), BLOCKS, 2, 16, 16, **{key: value})


def test_one_batch_is_no_part() -> None:
    assert described(spec(), BLOCKS, 2, 16, 16, enable_dbo=False, ubatch_size=1).caches


def test_only_a_window_whose_blocks_are_given_to_others_counts() -> None:
    full, sliding = FullAttentionSpec(sliding_window=64), SlidingWindowSpec(sliding_window=64)
    each = SimpleNamespace(kv_cache_specs={"a": sliding, "b": SlidingWindowSpec(sliding_window=32)})
    groups = [group(spec(), ["a"]), group(full, ["a"]), group(sliding, ["a"]), group(each, ["a", "b"])]
    assert [window_of(one) for one in groups] == [None, None, 64, 32]


def test_layers_that_share_the_kv_of_another_one_have_its_spec() -> None:
    caches = {name: torch.zeros(BLOCKS, 2, 16, 16) for name in names(2)}
    caches["model.layers.2.self_attn.attn"] = caches[names(2)[1]]
    found = describe(vllm_config(), config_of(group(spec(), names(2))), caches, RANK, "0.32.0")
    arguments = {"layout_hints": found.hints, "platform": CPU()}
    with CacheEngine.create(Config(chunk_size=32), found.metadata, found.caches, **arguments) as engine:
        assert engine.num_layers == 2
        assert engine.connector.layer_of["model.layers.2.self_attn.attn"] == 1


def test_a_layer_of_which_nothing_is_reported_is_refused_by_name() -> None:
    caches = {name: torch.zeros(BLOCKS, 2, 16, 16) for name in names(2)}
    with pytest.raises(ConfigError, match=names(2)[1]):
        describe(vllm_config(), config_of(group(spec(), names(1))), caches, RANK, "0.32.0")


@pytest.mark.parametrize(("key", "value"), [("quantization", "fp8"), ("hf_overrides", {"rope_theta": 5})])
def test_how_weights_are_read_is_part_of_the_revision(key: str, value: Any) -> None:
    caches = {name: torch.zeros(BLOCKS, 2, 16, 16) for name in names(1)}
    revisions = []
    for found in (None, {}, value):
        config = vllm_config()
        setattr(config.model_config, key, found)
        arguments = (config, config_of(group(spec(), names(1))), caches, RANK, "0.32.0")
        revisions.append(describe(*arguments).metadata.revision)
    assert revisions[:2] == ["", ""]
    assert key in revisions[2]


def revision_with(draft: Any) -> str:
    """Beside a way to draft, whose model's configuration is `draft`; None for no drafts at all."""
    caches = {name: torch.zeros(BLOCKS, 2, 16, 16) for name in names(1)}
    config = vllm_config()
    config.speculative_config = None if draft is None else SimpleNamespace(draft_model_config=draft)
    arguments = (config, config_of(group(spec(), names(1))), caches, RANK, "0.32.0")
    return str(describe(*arguments).metadata.revision)


def test_what_one_draft_model_keeps_is_not_found_for_another() -> None:
    """Nor for other weights of the same name: drafts from another model's KV are seldom right."""
    kinds = [("org/one", None), ("org/other", None), ("org/one", "later")]
    drafts = [SimpleNamespace(model=model, revision=revision) for model, revision in kinds]
    assert len({revision_with(draft) for draft in (None, *drafts)}) == 4


def test_drafts_without_a_model_of_their_own_find_what_is_stored_without_drafts() -> None:
    own = vllm_config().model_config
    ngram = SimpleNamespace(model=own.model, revision=own.revision)
    assert revision_with(ngram) == revision_with(None) == ""
