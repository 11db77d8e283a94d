from __future__ import annotations

from typing import Any

import pytest
import torch

from lwkv.errors import ConfigError
from lwkv.metadata import CacheMetadata

FIELDS: dict[str, Any] = {
    "model": "org/model",
    "num_layers": 3,
    "num_kv_heads": 2,
    "head_size": 5,
    "dtype": torch.bfloat16,
    "tp_size": 4,
    "tp_rank": 3,
}


def test_the_cache_stores_the_models_dtype_unless_told_otherwise() -> None:
    assert CacheMetadata(**FIELDS).stored_dtype is torch.bfloat16
    assert CacheMetadata(**FIELDS, kv_dtype=torch.float8_e4m3fn).stored_dtype is torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("model", None),
        ("revision", 7),
        ("rope", {"theta": 1}),
        ("num_layers", 0),
        ("num_layers", True),
        ("num_kv_heads", -1),
        ("head_size", 2.0),
        ("head_size", "5"),
        ("dtype", "bfloat16"),
        ("kv_dtype", "auto"),
        ("use_mla", 1),
        ("use_mla", "false"),
        ("tp_size", 0),
        ("tp_rank", 4),
        ("tp_rank", -1),
        ("tp_rank", False),
        ("pp_rank", 1),
    ],
)
def test_a_wrong_field_is_named_with_its_value(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as error:
        CacheMetadata(**{**FIELDS, field: value})
    assert str(error.value).startswith(f"CacheMetadata.{field}: got {value!r}; allowed: ")


def test_mla_has_one_head() -> None:
    with pytest.raises(ConfigError, match="num_kv_heads: got 2; allowed: 1 with use_mla"):
        CacheMetadata(**FIELDS, use_mla=True)
    assert CacheMetadata(**{**FIELDS, "num_kv_heads": 1}, use_mla=True).use_mla
