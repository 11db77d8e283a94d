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


BYTES = [torch.uint8, torch.int8]


@pytest.mark.parametrize("registered", BYTES)
def test_what_bytes_are_must_be_said(registered: torch.dtype) -> None:
    with pytest.raises(
        ConfigError, match=r"kv_dtype: got None; .*what the bytes are.* torch\.u?int8: such as torch\.float8"
    ):
        CacheMetadata(**FIELDS).as_registered([torch.bfloat16, registered])
    for kept in (torch.float8_e4m3fn, torch.float8_e5m2, registered):
        told = CacheMetadata(**FIELDS, kv_dtype=kept)
        assert told.as_registered([registered] * 2).stored_dtype is kept


def test_a_stored_dtype_that_no_layer_has_is_refused() -> None:
    told = CacheMetadata(**FIELDS, kv_dtype=torch.float16)
    with pytest.raises(ConfigError, match=r"got torch\.float16; .*the caches, registered as torch\.bf"):
        told.as_registered([torch.bfloat16] * 3)
    assert told.as_registered([torch.bfloat16, torch.float16]).stored_dtype is torch.float16


def test_what_is_registered_decides_layers_and_stored_dtype() -> None:
    found = CacheMetadata(**FIELDS).as_registered([torch.float16] * 7)
    assert (found.num_layers, found.stored_dtype, found.dtype) == (7, torch.float16, FIELDS["dtype"])
