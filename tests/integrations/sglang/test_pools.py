"""SGLang's pools are described, or refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lwkv.config.settings import Config
from lwkv.engine import CacheEngine
from lwkv.errors import ConfigError
from lwkv.integrations.sglang.pools import _LAYOUTS, Description, Rank, describe, refuse_components
from lwkv.layouts.layout import KVSpec


class MHATokenToKVPool(SimpleNamespace):
    pass


class MLATokenToKVPool(SimpleNamespace):
    pass


class NewTokenToKVPool(SimpleNamespace):
    pass


def mha(layers: int = 3, hnd: bool = False, dtype: torch.dtype = torch.float16, **more: Any) -> Any:
    shape = (6, 2, 4, 8) if hnd else (24, 2, 8)
    stored = torch.uint8 if dtype.itemsize == 1 else dtype
    k, v = ([torch.zeros(shape, dtype=stored) for _ in range(layers)] for _ in range(2))
    layout = "hnd" if hnd else "nhd"
    return MHATokenToKVPool(k_buffer=k, v_buffer=v, dtype=dtype, kv_cache_layout=layout, **more)


def mla(**more: Any) -> Any:
    return MLATokenToKVPool(
        kv_buffer=[torch.zeros(24, 1, 12, dtype=torch.bfloat16) for _ in range(2)],
        dtype=torch.bfloat16,
        **more,
    )


def arguments(**more: Any) -> Any:
    return SimpleNamespace(**{"model_path": "some/model", **more})


def engine_of(described: Description, page: int = 4) -> CacheEngine:
    config = Config(chunk_size=page, max_local_cpu_size=0.01)
    return CacheEngine.create(config, described.metadata, described.caches, "sglang", described.hints)


def namespace(pool: Any, rank: Rank | None = None, **more: Any) -> str:
    with engine_of(describe(pool, (), arguments(**more), rank or Rank())) as engine:
        return engine.namespace


@pytest.mark.parametrize("pool", [mha(), mha(hnd=True), mla(), mha(dtype=torch.float8_e4m3fn)])
def test_every_pool_that_is_described_can_be_moved(pool: Any) -> None:
    described = describe(pool, (), arguments(), Rank())
    with engine_of(described) as engine:
        assert engine.num_layers == described.num_layers
        assert engine.connector.num_slots == 24


def test_layers_of_draft_models_come_behind_the_models_own() -> None:
    described = describe(mha(), (mha(1), mha(2)), arguments(), Rank())
    assert list(described.caches)[3:] == ["draft_0_layer_0", "draft_1_layer_0", "draft_1_layer_1"]
    assert described.num_layers == 3
    with engine_of(described) as engine:
        assert engine.num_layers == 6


def test_both_layouts_of_heads_have_the_same_pages() -> None:
    assert namespace(mha()) == namespace(mha(hnd=True))


def test_everything_that_changes_bytes_changes_the_namespace() -> None:
    others = [
        namespace(mha(4)),
        namespace(mla()),
        namespace(mha(dtype=torch.float8_e4m3fn)),
        namespace(mha(dtype=torch.float8_e5m2)),
        namespace(mha(dtype=torch.bfloat16)),
        namespace(mha(), Rank(0, 2)),
        namespace(mha(), Rank(1, 2)),
        namespace(mha(), revision="main"),
        namespace(mha(), quantization="fp8"),
        namespace(mha(), dtype="float16"),
        namespace(mha(), json_model_override_args='{"rope_theta": 1}'),
        namespace(mha(), speculative_algorithm="EAGLE", speculative_draft_model_path="draft"),
        namespace(mha(), speculative_algorithm="STANDALONE", speculative_draft_model_path="draft"),
        namespace(
            mha(),
            speculative_algorithm="EAGLE",
            speculative_draft_model_path="draft",
            speculative_draft_model_revision="main",
        ),
        namespace(mha(), model_path="another/model"),
    ]
    assert len({namespace(mha()), *others}) == len(others) + 1


def test_layers_of_drafts_are_never_those_of_a_target_with_as_many_layers() -> None:
    """Whatever the arguments are: only how many layers each pool has differs here."""
    splits: list[tuple[int, ...]] = [(4,), (3, 1), (2, 2), (2, 1, 1), (1, 3)]
    names = set()
    for target, *drafts in splits:
        described = describe(mha(target), [mha(count) for count in drafts], arguments(), Rank())
        with engine_of(described) as engine:
            assert engine.num_layers == 4
            names.add(engine.namespace)
    assert len(names) == len(splits)


@pytest.mark.parametrize(
    ("pool", "text"),
    [
        (NewTokenToKVPool(), "NewTokenToKVPool is not supported"),
        (mha(is_quantized_kv_cache=True), "keeps scales"),
        (mha(k_scale_buffer=[torch.zeros(1)]), "keeps scales"),
        (mla(use_dsa=True), "use_dsa"),
        (mla(kv_scale_buffer=[torch.zeros(1)]), "keeps scales"),
    ],
)
def test_what_cannot_be_moved_is_refused_by_name(pool: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        describe(pool, (), arguments(), Rank())


def test_another_layout_or_values_of_another_size_are_refused() -> None:
    pool = mha()
    pool.kv_cache_layout = "vectorized_5d"
    with pytest.raises(ConfigError, match="'vectorized_5d' is not supported; lwkv moves nhd, hnd"):
        describe(pool, (), arguments(), Rank())
    pool = mha()
    pool.v_buffer = [torch.zeros(24, 2, 4) for _ in range(3)]
    with pytest.raises(ConfigError, match="K and V differ"):
        describe(pool, (), arguments(), Rank())


def test_no_layout_is_taken_for_another_one() -> None:
    """Each name has what reads its sizes: there is no layout that the rest falls into."""
    specs = {name: read(torch.zeros(3, 5, 7, 11)) for name, read in _LAYOUTS.items() if name != "nhd"}
    assert specs == {"hnd": KVSpec(5, 11, 7)}
    assert _LAYOUTS["nhd"](torch.zeros(3, 5, 7)) == KVSpec(5, 7, 1)


def test_other_state_than_that_of_full_attention_is_refused_by_name() -> None:
    refuse_components(["FULL"])
    with pytest.raises(ConfigError, match="MAMBA, SWA"):
        refuse_components(["FULL", "SWA", "MAMBA"])
