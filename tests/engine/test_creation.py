"""What an engine is made from, and what is refused at the start."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.rig import CHUNK, LAYERS
from oracle import Oracle

import lwkv.pipeline.tier_pages
from lwkv.config.settings import Config
from lwkv.engine import CacheEngine
from lwkv.errors import ConfigError, LayoutError
from lwkv.metadata import CacheMetadata


def create(oracle: Oracle, config: Config, **arguments: Any) -> CacheEngine:
    arguments = {"metadata": oracle.metadata, "platform": oracle.platform} | arguments
    return CacheEngine.create(
        config, kvcaches=oracle.kvcaches, layout_hints={"block_size": oracle.dims.block_size}, **arguments
    )


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"local_disk": "/not/there", "max_local_disk_size": 1.0}, "local_disk: '/not/there' cannot be used"),
        ({"remote_url": "s3://bucket"}, "no tier for s3://; allowed: file://"),
        ({"max_local_cpu_size": 1 / 2**20}, "one chunk of one layer needs"),
        (
            {"max_local_cpu_size": (LAYERS - 1) * 4096 / 2**30},
            rf"holds {LAYERS - 1} pages of 4096 bytes, but one chunk of {LAYERS} layers needs {LAYERS}",
        ),
    ],
    ids=[
        "a folder that is not there",
        "a remote tier of no kind",
        "a pool without room for a page",
        "a pool without room for a chunk",
    ],
)
def test_settings_that_cannot_work_are_refused_at_the_start(
    oracle: Oracle, settings: dict[str, Any], text: str
) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError, match=text):
        create(oracle, Config(chunk_size=CHUNK, **settings))
    assert threading.active_count() == before


def test_caches_of_another_device_type_are_refused(oracle: Oracle) -> None:
    name = oracle.platform.name

    class Elsewhere:
        """A platform of another device type."""

        name = device_type = "elsewhere"
        features = oracle.platform.features

    with pytest.raises(LayoutError, match=rf"the platform is 'elsewhere': name the platform '{name}'"):
        create(oracle, Config(), platform=Elsewhere())


def test_caches_on_a_device_that_no_platform_serves_are_refused_by_its_name() -> None:
    caches = {f"layer_{i}": torch.empty(2, 16, 4, 2, 3, device="meta") for i in range(LAYERS)}
    metadata = CacheMetadata("toy", LAYERS, 2, 3, torch.float32)
    with pytest.raises(ValueError, match="no platform for device 'meta'; known platforms: musa, xpu, cuda,"):
        CacheEngine.create(Config(), metadata, caches, layout_hints={"block_size": 4})


def test_metadata_with_other_heads_than_the_caches_is_refused(oracle: Oracle) -> None:
    metadata = CacheMetadata("toy", LAYERS, 5, 3, torch.float32)
    with pytest.raises(LayoutError, match="layer_0"):
        create(oracle, Config(), metadata=metadata)


def test_a_connector_without_caches_is_refused(oracle: Oracle) -> None:
    config, metadata = Config(max_local_cpu_size=0.01), oracle.metadata
    connector = lwkv.CreateGPUConnector(
        config, metadata, layout_hints={"block_size": 4, "layout": "vllm_2bnhd"}, platform=oracle.platform
    )
    assert connector.num_layers == 0
    with pytest.raises(ConfigError, match="no KV caches: call its register before"):
        CacheEngine(config, metadata, connector)


def test_the_line_at_the_start_has_platform_mode_tiers_and_memory(
    oracle: Oracle, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiers: dict[str, Any] = {"local_disk": str(tmp_path / "cache"), "max_local_disk_size": 1.0}
    config = Config(chunk_size=CHUNK, max_local_cpu_size=0.25, use_layerwise=True, **tiers)
    with caplog.at_level(logging.INFO, "lwkv"):
        create(oracle, config).close()
    (line,) = [text for text in caplog.messages if text.startswith("moves KV")]
    for part in (
        *("layer by layer", f"platform {oracle.platform.name}", f"{LAYERS} layers", "tiers: host, disk"),
        *("host memory: at most 0.25 GiB for ", f"chunks of {CHUNK} tokens"),
    ):
        assert part in line
