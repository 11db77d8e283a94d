"""A blending file written for LMCache, as it is, blends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from blend.conftest import SEED, some_tokens

from lwkv.blend import Blender, BlendRequest, Separator
from lwkv.config.settings import Config
from lwkv.reference import ModelShape, PagedCache, open_cache_engine, random_model
from lwkv.reference.blending import ReferenceBlend

FILE = Path(__file__).parents[1] / "golden" / "lmcache_blending.yaml"


def encode(text: str) -> list[int]:
    return [ord(character) % 89 for character in text]


def test_it_decides_what_is_cut_cached_and_computed(shape: ModelShape, device: torch.device) -> None:
    config = Config.load(FILE)
    model = random_model(replace(shape, max_positions=2000), seed=SEED, device=device)
    cache = PagedCache(model.shape, num_blocks=150, device=device)
    with open_cache_engine(config, model, cache, "tiny") as engine:
        blender = Blender(engine, ReferenceBlend(model), shared_prefix=(7, 8))
        separator = Separator(encode, config.blend_special_str)
        documents = [some_tokens(count, 10 * number) for number, count in enumerate((300, 256, 40))]
        for document in documents:
            blender.encode(document, np.arange(blender.num_encoded(len(document))))
        assert engine.flush()
        tokens = separator.join([[95, 96], documents[1], documents[2], documents[0], [1, 2, 3]])
        segments = separator.segments(tokens)
        (found,) = blender.prefill([BlendRequest(tokens, np.arange(len(tokens)), segments)])
        assert [end - start for start, end in segments] == [2, 256, 40, 300]
        assert (found.num_reused, found.num_chosen, found.share) == (596, 89, 0.15)
        # Fewer than blend_min_tokens, which are 256 where a file does not say it.
        short = separator.join([documents[2], [1, 2, 3]])
        (found,) = blender.prefill([BlendRequest(short, np.arange(len(short)), separator.segments(short))])
        assert (found.num_reused, found.num_computed) == (0, len(short))
