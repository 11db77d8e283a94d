"""CreateGPUConnector: which connector for which settings and platform, and clear refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lwkv.config.settings import Config
from lwkv.connectors import BufferConnector, CreateGPUConnector, PagedConnector
from lwkv.errors import ConfigError
from lwkv.layouts.layout import KVSpec
from lwkv.metadata import CacheMetadata
from lwkv.platforms import Features, Platform
from lwkv.platforms.cpu import CPU

METADATA = CacheMetadata("toy", 3, 2, 4, torch.float32)
HINTS: Any = {"block_size": 4}


class WithoutBlending(CPU):
    """A platform as MUSA's: layer by layer, but no blending."""

    name = "musa-like"
    features = Features(blending=False)


class WithoutLayers(CPU):
    name = "serial"
    features = Features(layerwise=False, blending=False)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, PagedConnector),
        ({"use_layerwise": True}, PagedConnector),
        ({"use_layerwise": True, "enable_blending": True}, BufferConnector),
    ],
    ids=["bulk", "layerwise", "blending"],
)
def test_the_settings_choose_the_connector(platform: Platform, settings: Any, kind: type) -> None:
    if settings.get("enable_blending") and not platform.features.blending:
        with pytest.raises(ConfigError, match="enable_blending is not supported"):
            CreateGPUConnector(Config(**settings), METADATA, layout_hints=HINTS, platform=platform)
    else:
        made = CreateGPUConnector(Config(**settings), METADATA, layout_hints=HINTS, platform=platform)
        assert type(made) is kind
        assert made.platform is platform


def test_a_platform_may_be_named_or_found(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    named = CreateGPUConnector(Config(), METADATA, layout_hints=HINTS, platform=platform.name)
    monkeypatch.setenv("LWKV_PLATFORM", platform.name)
    found = CreateGPUConnector(Config(), METADATA, layout_hints=HINTS)
    assert named.platform is found.platform is platform


def test_blending_is_refused_where_it_is_not_supported() -> None:
    config = Config(use_layerwise=True, enable_blending=True)
    with pytest.raises(ConfigError, match=r"enable_blending .* 'musa-like', only on .*cuda.*: set .* false"):
        CreateGPUConnector(config, METADATA, layout_hints=HINTS, platform=WithoutBlending())


@pytest.mark.parametrize("layerwise", [False, True])
def test_without_blending_the_platform_need_not_support_it(layerwise: bool) -> None:
    config = Config(use_layerwise=layerwise)
    made = CreateGPUConnector(config, METADATA, layout_hints=HINTS, platform=WithoutBlending())
    assert type(made) is PagedConnector


def test_layers_one_by_one_are_refused_where_they_are_not_supported() -> None:
    with pytest.raises(ConfigError, match="use_layerwise is not supported on platform 'serial'"):
        CreateGPUConnector(Config(use_layerwise=True), METADATA, layout_hints=HINTS, platform=WithoutLayers())


@pytest.mark.parametrize("settings", [{}, {"use_layerwise": True}], ids=["bulk", "layerwise"])
def test_hpu_is_refused_whatever_is_asked(settings: Any) -> None:
    with pytest.raises(ValueError, match=r"'hpu' \(argument\), which lwkv does not support: .*overlap"):
        CreateGPUConnector(Config(**settings), METADATA, layout_hints=HINTS, platform="hpu")


def test_blending_goes_layer_by_layer() -> None:
    with pytest.raises(ValueError, match=r"enable_blending=True .* set use_layerwise to true"):
        Config(enable_blending=True)


@pytest.mark.parametrize(
    ("engine", "hints", "text"),
    [
        ("trtllm", HINTS, "no engine 'trtllm'; there are vllm, sglang"),
        ("vllm", {}, "block_size"),
        ("vllm", None, "block_size"),
        ("vllm", {"block_size": 4, "layot": "x"}, "no layout hint 'layot'.*did you mean layout"),
        ("sglang", {"shape": 1}, "no layout hint 'shape'; there are block_size, specs, layout, opaque_tag"),
        ("vllm", {"specs": {"l.0": (2, 4)}}, r"'specs'\] is .*; it must be a KVSpec for each layer name"),
        ("vllm", {"specs": [KVSpec(2, 4, 4)]}, "it must be a KVSpec for each layer name"),
        ("vllm", {"specs": {"l.0": KVSpec(2, 4, 4)}, "block_size": 4}, "leave block_size out"),
        ("vllm", {"specs": {}}, "it must be a KVSpec for each layer name"),
    ],
    ids=[
        "engine",
        "no block size",
        "no hints",
        "a typing error",
        "another hint",
        "no specs",
        "specs without names",
        "two block sizes",
        "empty specs",
    ],
)
def test_an_unknown_engine_or_hint_is_refused(engine: str, hints: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        CreateGPUConnector(Config(), METADATA, engine, hints, CPU())


def test_an_unknown_platform_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown platform 'cudaa' \(argument\); .*did you mean 'cuda'"):
        CreateGPUConnector(Config(), METADATA, layout_hints=HINTS, platform="cudaa")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"config": {"chunk_size": 16}},
            r"config is \{'chunk_size': 16\}, of type dict: pass Config\(\.\.\.\)",
        ),
        ({"metadata": None}, "metadata is None, of type NoneType: pass CacheMetadata"),
        ({"layout_hints": 16}, "layout_hints is 16, of type int: pass {'block_size'"),
        (
            {"layout_hints": {"block_size": "16"}},
            r"layout_hints\['block_size'\] is '16'; it must be a whole number",
        ),
        ({"layout_hints": {"block_size": True}}, "True; it must be a whole number"),
        ({"layout_hints": {"block_size": 4, "layout": 3}}, r"layout_hints\['layout'\] is 3; it must be text"),
    ],
)
def test_an_argument_of_another_type_is_refused(arguments: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text.replace("{'block_size'", '{"block_size"')):
        CreateGPUConnector(
            **{
                "config": Config(),
                "metadata": METADATA,
                "layout_hints": HINTS,
                "platform": CPU(),
                **arguments,
            }
        )
