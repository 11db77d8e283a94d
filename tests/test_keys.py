from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from python_path import python_path

import lwkv
import lwkv.keys
from lwkv.errors import RequestError
from lwkv.keys import ChunkKey, LayerKey, as_token_ids, chunk_keys, make_namespace
from lwkv.metadata import CacheMetadata

GOLDEN = json.loads((Path(__file__).parent / "golden" / "keys.json").read_text())
METADATA = CacheMetadata("org/Model-7B", 3, 2, 5, torch.bfloat16, tp_size=2, tp_rank=1, pp_size=2, pp_rank=1)
OTHER: dict[str, Any] = {
    "model": "org/Model-8B",
    "num_layers": 4,
    "num_kv_heads": 1,
    "head_size": 6,
    "dtype": torch.float16,
    "kv_dtype": torch.uint8,
    "revision": "abc",
    "rope": "yarn:2",
    "tp_size": 3,
    "tp_rank": 0,
    "pp_size": 3,
    "pp_rank": 0,
}
IDS = [0, 1, 7, 151_643, 2**31 - 1, 5, 6]
TEXTS = st.text(max_size=8)


def golden_metadata(case: dict[str, Any]) -> CacheMetadata:
    fields = dict(case["metadata"])
    dtypes = {name: getattr(torch, fields.pop(name)) for name in ("dtype", "kv_dtype") if name in fields}
    return CacheMetadata(**fields, **dtypes)


def golden_keys(case: dict[str, Any]) -> list[str]:
    namespace = make_namespace(golden_metadata(case), case["chunk_size"], case["page_format"])
    keys = chunk_keys(case["tokens"], case["chunk_size"], namespace, case["salts"], case["partial"])
    return [key.to_string() for key in keys]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: str(case["name"]))
def test_keys_are_those_of_the_golden_file(case: dict[str, Any]) -> None:
    assert golden_keys(case) == case["keys"]


def test_processes_with_any_hash_seed_have_the_same_keys() -> None:
    script = (
        "from lwkv.keys import chunk_keys\n"
        "for key in chunk_keys([1, 2, 3, 4, 5], 2, 'ns', ['lora', ''], partial=True): print(key.to_string())"
    )
    children = []
    for seed in (None, "0", "1"):  # "random" is what unset means
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        environment |= {"PYTHONHASHSEED": seed} if seed else {}
        environment["PYTHONPATH"] = python_path(Path(lwkv.__file__).parents[1])
        command = [sys.executable, "-c", script]
        children.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    expected = [key.to_string() for key in chunk_keys([1, 2, 3, 4, 5], 2, "ns", ["lora", ""], partial=True)]
    for child in children:
        assert child.communicate()[0].split() == expected
        assert child.returncode == 0


def test_no_module_calls_the_builtin_hash() -> None:
    root = Path(lwkv.__file__).parent
    for path in [*root.rglob("*.py"), *(root / "platforms").resolve().rglob("*.py")]:
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        names = [call.func.id for call in calls if isinstance(call.func, ast.Name)]
        assert "hash" not in names, path


# namespaces


def test_every_field_of_the_metadata_has_another_value_to_try() -> None:
    assert {*OTHER, "use_mla"} == {field.name for field in dataclasses.fields(CacheMetadata)}


@pytest.mark.parametrize("field", OTHER)
def test_another_value_of_any_field_is_another_namespace(field: str) -> None:
    changed = dataclasses.replace(METADATA, **{field: OTHER[field]})
    assert make_namespace(changed, 256, "canonical") != make_namespace(METADATA, 256, "canonical")


def test_mla_is_another_namespace() -> None:
    one_head = dataclasses.replace(METADATA, num_kv_heads=1)
    mla = dataclasses.replace(one_head, use_mla=True)
    assert make_namespace(mla, 256, "canonical") != make_namespace(one_head, 256, "canonical")


def test_chunk_size_page_format_and_format_version_are_in_the_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    formats = ["canonical", "opaque:cpu:16:avx512", "opaque:cpu:32:avx512", "opaque:cpu:16:amx"]
    names = {make_namespace(METADATA, size, form) for size in (16, 256) for form in formats}
    monkeypatch.setattr(lwkv.keys, "FORMAT_VERSION", 999)
    assert len(names | {make_namespace(METADATA, 256, "canonical")}) == 9


def test_names_and_order_of_the_layers_are_in_the_namespace() -> None:
    lists = [(), ("a",), ("a", "b"), ("b", "a"), ("ab",), ("a", "b", "layer"), ("a", "layer", "b")]
    names = {make_namespace(METADATA, 256, "canonical", layers) for layers in lists}
    assert len(names) == len(lists)
    assert make_namespace(METADATA, 256, "canonical", ["a", "b"]) in names


def test_every_pair_of_logical_and_stored_dtype_is_another_namespace() -> None:
    dtypes = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8)
    pairs = [
        dataclasses.replace(METADATA, dtype=logical, kv_dtype=stored)
        for logical in dtypes
        for stored in dtypes
    ]
    assert len({make_namespace(metadata, 256, "canonical") for metadata in pairs}) == len(dtypes) ** 2


def test_a_stored_dtype_that_is_the_models_own_changes_nothing() -> None:
    told = dataclasses.replace(METADATA, kv_dtype=METADATA.dtype)
    assert make_namespace(told, 256, "canonical") == make_namespace(METADATA, 256, "canonical")


def test_text_cannot_move_from_one_field_to_the_next() -> None:
    first = dataclasses.replace(METADATA, revision="ab", rope="c")
    second = dataclasses.replace(METADATA, revision="a", rope="bc")
    assert make_namespace(first, 256, "canonical") != make_namespace(second, 256, "canonical")


# token ids


class OnlyASequence(Sequence[Any]):
    """What an engine that wraps its list of ids hands out."""

    def __getitem__(self, index: Any) -> Any:
        return IDS[index]

    def __len__(self) -> int:
        return len(IDS)


@pytest.mark.parametrize(
    "tokens",
    [
        IDS,
        tuple(IDS),
        OnlyASequence(),
        [np.int64(token) for token in IDS],
        np.array(IDS, np.int32),
        np.array(IDS, np.int64),
        np.array(IDS, np.uint32),
        np.array(IDS, ">i4"),
        np.repeat(np.array(IDS, np.int64), 2)[::2],
        torch.tensor(IDS, dtype=torch.int32),
        torch.tensor(IDS, dtype=torch.int64),
        torch.tensor(IDS).repeat_interleave(2)[::2],
    ],
    ids=lambda tokens: f"{type(tokens).__name__}-{getattr(tokens, 'dtype', '')}",
)
def test_the_same_ids_give_the_same_keys_whatever_holds_them(tokens: Any) -> None:
    ids = as_token_ids(tokens)
    assert ids.dtype == np.int64
    assert ids.tolist() == IDS
    assert chunk_keys(tokens, 3, "ns", partial=True) == chunk_keys(IDS, 3, "ns", partial=True)


def test_a_range_and_the_largest_id_are_token_ids() -> None:
    assert as_token_ids(range(3, 6)).tolist() == [3, 4, 5]
    assert as_token_ids([2**63 - 1]).tolist() == [2**63 - 1]
    assert chunk_keys([2**32], 1, "ns") != chunk_keys([0], 1, "ns")


@pytest.mark.parametrize(
    "tokens", [[], (), range(0), np.array([], np.int32), torch.tensor([], dtype=torch.int64)]
)
def test_no_ids_give_no_keys(tokens: Any) -> None:
    assert as_token_ids(tokens).shape == (0,)
    assert chunk_keys(tokens, 3, "ns", partial=True) == []


@pytest.mark.parametrize(
    "tokens",
    [
        [1.0, 2.0],
        [1, 2.0],
        [1, True],
        [True],
        ["1", "2"],
        [[1, 2]],
        [None],
        [-1],
        [2**63],
        [2**64],
        "12",
        b"12",
        12,
        None,
        {1, 2},
        iter([1, 2]),
        np.array([1.0]),
        np.array([True]),
        np.array([[1, 2]]),
        np.array(3),
        np.array([3, -2]),
        np.array([2**63], np.uint64),
        np.array(["1"]),
        torch.tensor([1.0]),
        torch.tensor([True]),
        torch.tensor([[1, 2]]),
        torch.tensor(3),
        torch.tensor([-3]),
        torch.tensor([3], dtype=torch.int16),
    ],
)
def test_what_is_no_row_of_ids_is_refused(tokens: Any) -> None:
    with pytest.raises(RequestError, match=r"token ids: got .*; allowed: a list, tuple"):
        as_token_ids(tokens)


# chunks


@pytest.mark.parametrize(
    ("tokens", "got"),
    [
        (None, "NoneType"),
        ("ids", "str"),
        (np.int64(3), "int64"),
        (np.zeros(2), "ndarray of float64"),
        ([1, "a"], "list of int, str"),
    ],
)
def test_what_was_given_as_token_ids_is_named(tokens: Any, got: str) -> None:
    with pytest.raises(RequestError, match=rf"token ids: got {got}; allowed"):
        as_token_ids(tokens)


def test_a_chunk_is_named_by_all_tokens_up_to_its_end() -> None:
    keys = chunk_keys(range(9), 3, "ns")
    for changed in range(9):
        tokens = [token + 100 * (token == changed) for token in range(9)]
        same = [a == b for a, b in zip(chunk_keys(tokens, 3, "ns"), keys, strict=True)]
        assert same == [changed >= 3 * (chunk + 1) for chunk in range(3)]


@given(length=st.integers(0, 13), chunk_size=st.integers(1, 5), more=st.integers(0, 6))
def test_longer_prompts_keep_the_keys_of_their_prefix(length: int, chunk_size: int, more: int) -> None:
    keys = chunk_keys(range(length), chunk_size, "ns")
    assert len(keys) == length // chunk_size
    assert chunk_keys(range(length + more), chunk_size, "ns")[: len(keys)] == keys
    with_tail = chunk_keys(range(length), chunk_size, "ns", partial=True)
    assert with_tail[: len(keys)] == keys
    assert len(with_tail) == -(-length // chunk_size)


def test_a_tail_never_has_the_key_of_a_full_chunk_or_of_another_tail() -> None:
    keys = {chunk_keys(range(length), 4, "ns", partial=True)[-1] for length in range(1, 9)}
    keys |= {chunk_keys(range(length), size, "ns")[-1] for size in (1, 2, 3) for length in (6,)}
    assert len(keys) == 8 + 3


def test_namespace_and_salts_change_every_key() -> None:
    variants: list[tuple[str, list[str]]] = [
        ("ns", []),
        ("ns", [""]),
        ("ns", ["", ""]),
        ("ns", ["ab", "c"]),
        ("ns", ["a", "bc"]),
        ("ns", ["c", "ab"]),
        ("ns", ["abc"]),
        ("nsa", ["bc"]),
        ("ns", ["4"]),
        ("ns", ["\ud800"]),
        ("ns", ["é"]),
        ("ns", ["e\u0301"]),
    ]
    keys = [chunk_keys(range(4), 2, namespace, salts) for namespace, salts in variants]
    assert len({key.hash for both in keys for key in both}) == 2 * len(variants)


@given(st.lists(st.tuples(TEXTS, st.lists(TEXTS, max_size=3)), min_size=2, max_size=2, unique_by=repr))
def test_no_two_roots_are_alike(roots: list[tuple[str, list[str]]]) -> None:
    first, second = (chunk_keys([1], 1, namespace, salts)[0].hash for namespace, salts in roots)
    assert first != second


def test_salts_that_share_their_end_are_apart() -> None:
    end = "f" * 16
    keys = {chunk_keys([1], 1, "ns", [f"{number:x}{end}"])[0] for number in range(20_000)}
    assert len(keys) == 20_000


@pytest.mark.parametrize("salts", ["lora", [None], [3], [b"x"]])
def test_salts_are_texts(salts: Any) -> None:
    with pytest.raises(RequestError, match=r"salts: got .*; allowed"):
        chunk_keys([1], 1, "ns", salts)


def test_a_chunk_has_tokens() -> None:
    with pytest.raises(RequestError, match="chunk_size: got 0; allowed"):
        chunk_keys([1], 0, "ns")


# keys as text


def read(text: str) -> ChunkKey:
    namespace, _, digits = text.rpartition(".")
    return ChunkKey(namespace, bytes.fromhex(digits))


def test_a_chunk_is_split_into_its_layers_in_order() -> None:
    key = ChunkKey("ns", bytes(16))
    assert key.split_layers(3) == [LayerKey(key, 0), LayerKey(key, 1), LayerKey(key, 2)]


@given(
    model=st.one_of(
        st.text(min_size=1, max_size=300), st.sampled_from(["a/b@c.d:e|f", "é" * 300, "../..", "-.-"])
    ),
    digest=st.binary(min_size=16, max_size=16),
    layer=st.integers(0, 999_999),
)
def test_keys_come_back_from_text_that_is_safe_as_a_file_name(model: str, digest: bytes, layer: int) -> None:
    namespace = make_namespace(dataclasses.replace(METADATA, model=model), 256, "canonical")
    chunk = ChunkKey(namespace, digest)
    key = LayerKey(chunk, layer)
    assert read(chunk.to_string()) == chunk
    assert key.to_string().rsplit(".", 1) == [chunk.to_string(), str(layer)]
    for text in (chunk.to_string(), key.to_string()):
        assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*", text)
        assert len(text) <= 122


def test_the_longest_key_fits_a_file_name() -> None:
    text = LayerKey(ChunkKey("n" * 128, b"\xff" * 16), 999_999).to_string()
    assert len(text) <= 200


def test_text_of_a_layer_is_no_chunk() -> None:
    digits = ChunkKey("a." + "1" * 32, bytes.fromhex("2" * 32))
    assert read(digits.to_string()) == digits
    for layer in (0, 4, 999_999):
        assert not re.search(r"\.[0-9a-f]{32}$", LayerKey(digits, layer).to_string())


@pytest.mark.parametrize(
    "key",
    [
        ChunkKey("a/b", bytes(16)),
        ChunkKey("", bytes(16)),
        ChunkKey("ns", b""),
        ChunkKey("n" * 129, bytes(16)),
    ],
)
def test_a_key_that_cannot_be_read_back_is_not_written(key: ChunkKey) -> None:
    with pytest.raises(ValueError, match="is no key of a chunk"):
        key.to_string()
    with pytest.raises(ValueError, match="layer -1"):
        LayerKey(key, -1).to_string()
