"""Registered KV tensors become views of the same memory, or are refused. Never guessed."""

from __future__ import annotations

import logging
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lwkv.errors import ConfigError, LayoutError
from lwkv.kernels import Rows, TorchKernels
from lwkv.layouts.layout import LAYOUTS, KVSpec, describe_layers

SPEC = KVSpec(num_kv_heads=3, head_size=8, block_size=4)
MLA = KVSpec(num_kv_heads=1, head_size=9, block_size=4, use_mla=True)
DTYPES = [
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8, torch.int8),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def make_kv(spec: KVSpec, blocks: int, dtype: torch.dtype, layer: int = 0) -> Tensor:
    """K and V, (2, B, N, H, D), of random bits: NaN patterns and all."""
    shape = (2, blocks, spec.block_size, spec.num_kv_heads, spec.head_size * dtype.itemsize)
    bits = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(layer))
    return bits.view(dtype)


def put(t: Tensor, order: list[int] | None = None, gap: int = 0, offset: int = 0) -> Tensor:
    """Copy `t` into memory of its own with its outer dimensions in physical `order`, each padded by `gap`."""
    order = [*(order or range(t.dim() - 1)), t.dim() - 1]
    sizes = [t.shape[dim] for dim in reversed(order)]
    steps = dict(
        zip(reversed(order), accumulate(sizes, lambda step, size: step * size + gap, initial=1), strict=False)
    )
    strides = [steps[dim] for dim in range(t.dim())]
    need = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, strides, strict=True))
    memory = torch.full(((need + offset) * t.dtype.itemsize,), 0xA5, dtype=torch.uint8).view(t.dtype)
    view = memory.as_strided(t.shape, strides, offset)
    view.view(INTEGERS[t.dtype.itemsize]).copy_(t.view(INTEGERS[t.dtype.itemsize]))
    return view


def arrange(name: str, kv: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    """The tensor that an engine with layout `name` would keep for this K and V."""
    if name == "sglang_kv":
        return kv[0].flatten(0, 1), kv[1].flatten(0, 1)
    if name == "sglang_kv_hnd":
        return kv[0].transpose(1, 2), kv[1].transpose(1, 2)
    made = {
        "vllm_2bnhd": lambda: kv,
        "vllm_b2nhd": lambda: kv.transpose(0, 1),
        "vllm_2bhnd": lambda: kv.transpose(2, 3),
        "vllm_b2hnd": lambda: kv.transpose(2, 3).transpose(0, 1),
        "vllm_bhn2d": lambda: torch.stack(list(kv), dim=-2).flatten(-2).transpose(1, 2),
        "vllm_mla": lambda: kv[0].flatten(2),
        "sglang_mla": lambda: kv[0].flatten(0, 1),
    }
    return made[name]()


def same_bits(a: Tensor, b: Tensor) -> bool:
    integer = INTEGERS[a.dtype.itemsize]
    return torch.equal(a.view(integer), b.view(integer))


def spec_of(name: str) -> KVSpec:
    return MLA if name.endswith("mla") else SPEC


FOUND = {layout.name for layout in LAYOUTS if not layout.k_transposed}
names = pytest.mark.parametrize("name", sorted(FOUND))


@names
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("declared", [True, False])
def test_k_and_v_of_every_token_are_found_in_place(name: str, dtype: torch.dtype, declared: bool) -> None:
    kv = make_kv(spec_of(name), 5, dtype)
    registered = arrange(name, kv)
    (layer,) = describe_layers({"a": registered}, spec_of(name), layout=name if declared else None)
    first = registered if isinstance(registered, Tensor) else registered[0]
    assert layer.k.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    assert (layer.name, layer.dtype, layer.page_format) == ("a", dtype, "canonical")
    assert layer.k.dtype == INTEGERS[dtype.itemsize]
    assert same_bits(layer.k, kv[0])
    assert layer.v is None if "mla" in name else same_bits(layer.v, kv[1])


@settings(deadline=None)
@given(data=st.data())
def test_any_physical_order_padding_and_offset_is_described(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(FOUND - {"sglang_kv", "sglang_kv_hnd"})))
    spec = spec_of(name)
    kv = make_kv(spec, data.draw(st.integers(3, 5)), data.draw(st.sampled_from(DTYPES)))
    logical = arrange(name, kv)
    order = data.draw(st.permutations(range(logical.dim() - 1)))
    registered = put(logical, list(order), data.draw(st.integers(0, 5)), data.draw(st.integers(0, 7)))
    (layer,) = describe_layers([registered], spec)
    assert layer.name == "layer_0"
    assert same_bits(layer.k, kv[0])
    assert layer.v is None or same_bits(layer.v, kv[1])


@names
def test_pages_are_packed_and_a_chunk_moves_between_blocks(name: str) -> None:
    spec = spec_of(name)
    registered = arrange(name, make_kv(spec, 4, torch.float16))
    pair = registered if isinstance(registered, tuple) else (registered,)
    (layer,) = describe_layers([tuple(put(t, gap=3, offset=1) for t in pair)], spec)
    before = [t.clone() for t in (layer.k, layer.v) if t is not None]
    kernels, tokens = TorchKernels(), 7
    staging = torch.zeros(layer.page_bytes(tokens), dtype=torch.uint8)
    count = torch.arange(tokens)
    kernels.gather(layer, staging, Rows(count + 1, count, count + tokens))
    page = torch.stack([t.flatten(0, 1)[1 : tokens + 1] for t in before])
    assert torch.equal(staging, page.contiguous().view(torch.uint8).flatten())
    kernels.scatter(layer, staging, Rows(count + 9, count, count + tokens))
    after = [t for t in (layer.k, layer.v) if t is not None]
    for now, then in zip(after, before, strict=True):
        expected = then.flatten(0, 1).clone()
        expected[9:] = expected[1 : tokens + 1].clone()
        assert torch.equal(now.flatten(0, 1), expected)


def transposed(kv: Tensor) -> Tensor:
    """(B, H, N, 2D), in which a block's head has all of K as (D, N), then all of V as (N, D)."""
    k, v = kv[0].permute(0, 2, 3, 1).flatten(2), kv[1].permute(0, 2, 1, 3).flatten(2)
    together: Tensor = torch.cat([k, v], -1)
    return together.view(*together.shape[:2], kv.shape[2], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_are_found_where_k_is_kept_element_by_element(dtype: torch.dtype) -> None:
    kv = make_kv(SPEC, 5, dtype)
    registered = transposed(kv)
    (layer,) = describe_layers([registered], SPEC, layout="vllm_cpu_vec")
    assert layer.k.untyped_storage().data_ptr() == registered.untyped_storage().data_ptr()
    assert same_bits(layer.k, kv[0])
    assert layer.v is not None
    assert same_bits(layer.v, kv[1])
    kernels, count = TorchKernels(), torch.arange(7)
    staging = torch.zeros(layer.page_bytes(7), dtype=torch.uint8)
    kernels.gather(layer, staging, Rows(count + 2, count, count + 7))
    kernels.scatter(layer, staging, Rows(count + 11, count, count + 7))
    for part in (layer.k.flatten(0, 1), layer.v.flatten(0, 1)):
        assert same_bits(part[11:18], part[2:9])
    assert same_bits(transposed(torch.stack([layer.k.view(dtype), layer.v.view(dtype)])), registered)


def test_keys_kept_element_by_element_are_never_assumed_and_need_whole_blocks() -> None:
    registered = transposed(make_kv(SPEC, 5, torch.float32))
    (assumed,) = describe_layers([registered], SPEC)
    (declared,) = describe_layers([registered], SPEC, layout="vllm_cpu_vec")
    assert not same_bits(assumed.k, declared.k)
    with pytest.raises(LayoutError, match="contiguous blocks"):
        describe_layers([put(registered, gap=3)], SPEC, layout="vllm_cpu_vec")


def test_layers_of_a_block_may_be_interleaved_in_one_storage() -> None:
    kvs = [make_kv(SPEC, 4, torch.bfloat16, layer) for layer in range(3)]
    together = torch.stack([arrange("vllm_bhn2d", kv) for kv in kvs], dim=1)
    layers = describe_layers({f"l{i}": together[:, i] for i in range(3)}, SPEC)
    assert all(layer.k.stride(0) == 3 * 2 * 4 * 3 * 8 for layer in layers)
    for layer, kv in zip(layers, kvs, strict=True):
        assert same_bits(layer.k, kv[0])
        assert same_bits(layer.v, kv[1])


def test_layers_may_differ_when_each_has_its_spec() -> None:
    specs = {"latent": MLA, "indexer": KVSpec(1, 5, 4, use_mla=True), "attention": SPEC}
    registered = {
        "latent": arrange("vllm_mla", make_kv(MLA, 3, torch.bfloat16)),
        "indexer": arrange("vllm_mla", make_kv(specs["indexer"], 3, torch.uint8)),
        "attention": arrange("vllm_b2nhd", make_kv(SPEC, 3, torch.float16)),
    }
    layers = describe_layers(registered, specs)
    assert [layer.name for layer in layers] == ["latent", "indexer", "attention"]
    assert [layer.row_bytes for layer in layers] == [18, 5, 48]
    assert [layer.page_bytes(6) for layer in layers] == [6 * 18, 6 * 5, 2 * 6 * 48]


def test_a_layer_tells_its_sizes() -> None:
    (layer,) = describe_layers([torch.zeros(2, 7, 4, 3, 8)], SPEC)
    assert (layer.heads, layer.width, layer.parts, layer.num_rows) == (3, 8, 2, 28)
    assert layer.row_bytes == 3 * 8 * 4
    assert layer.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("shape", "spec", "both"),
    [
        ((2, 2, 4, 3, 8), SPEC, ("vllm_2bnhd", "vllm_b2nhd")),
        ((2, 5, 4, 4, 8), KVSpec(4, 8, 4), ("vllm_2bnhd", "vllm_2bhnd")),
        ((5, 2, 4, 4, 8), KVSpec(4, 8, 4), ("vllm_b2nhd", "vllm_b2hnd")),
    ],
    ids=["two blocks", "heads like tokens, K/V first", "heads like tokens, block first"],
)
def test_coinciding_sizes_are_refused_unless_declared(
    shape: tuple[int, ...], spec: KVSpec, both: tuple[str, str]
) -> None:
    cache = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    with pytest.raises(LayoutError, match=r"'deep\.3'.*declare which with layout=") as caught:
        describe_layers({"deep.3": cache}, spec)
    text = str(caught.value)
    assert all(word in text for word in (*both, str(shape), str(cache.stride()), "torch.float32"))
    read = {name: describe_layers({"deep.3": cache}, spec, layout=name)[0].k for name in both}
    assert not torch.equal(read[both[0]], read[both[1]])


def test_candidates_that_read_the_same_bytes_are_no_ambiguity() -> None:
    spec = KVSpec(num_kv_heads=1, head_size=8, block_size=1)
    (layer,) = describe_layers([torch.arange(48.0).view(2, 3, 1, 1, 8)], spec)
    assert layer.k.view(torch.float32).flatten().tolist() == list(range(24))


# Of these keys cannot be turned: they have no sign, or share a byte.
ODD = [getattr(torch, name) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, name)]


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (torch.zeros(2, 5, 4, 3, 9), "is not"),
        (torch.zeros(5, 4, 3, 16), "is not"),
        (torch.zeros(2, 5, 8, 3, 8), "is not"),
        ((torch.zeros(21, 3, 8), torch.zeros(21, 3, 8)), "is not"),
        ((torch.zeros(20, 3, 8), torch.zeros(20, 3, 4)), "differ in shape, strides or dtype"),
        ((torch.zeros(20, 3, 8), torch.zeros(20, 3, 8).half()), "differ in shape, strides or dtype"),
        ((torch.zeros(20, 3, 8),) * 2, "same address as its own other part"),
        ((torch.zeros(1),) * 3, "expected a strided tensor"),
        (torch.zeros(2, 5, 4, 3, 8).to_sparse(), "expected a strided tensor"),
        ("cache", "expected a strided tensor"),
        (torch.zeros(2, 0, 4, 3, 8), "holds no block"),
        (torch.tensor(0.0), "holds no block"),
        (torch.zeros(2, 5, 4, 3, 16)[..., ::2], "stride 1"),
        (torch.zeros(2, 1, 4, 3, 8).expand(2, 5, 4, 3, 8), "overlaps"),
        (torch.zeros(600).as_strided((2, 5, 4, 3, 8), (200, 40, 24, 8, 1)), "overlaps"),
        (torch.zeros(2, 5, 4, 3, 8, device="meta"), "real device"),
        (torch.zeros(2, 5, 4, 3, 8, dtype=torch.complex64), "unsupported dtype"),
        (torch.zeros(2, 5, 4, 3, 8, dtype=torch.bool), "unsupported dtype"),
        *((torch.zeros(2, 5, 4, 3, 8, dtype=torch.uint8).view(dtype), "unsupported dtype") for dtype in ODD),
    ],
)
def test_what_cannot_be_a_cache_is_refused_with_the_layers_name(cache: Tensor, reason: str) -> None:
    with pytest.raises(LayoutError, match=rf"'first\.one'.*{reason}"):
        describe_layers({"first.one": cache}, SPEC)


@pytest.mark.parametrize(
    ("cache", "spec", "text"),
    [
        (
            torch.zeros(2, 5, 16, 3, 8),
            KVSpec(3, 8, 32),
            "(2, B, N, H, D), but N is 16 in the tensor, block_size is 32.",
        ),
        (
            torch.zeros(5, 4, 3, 16),
            SPEC,
            "(B, H, N, 2D), but H is 4 in the tensor, num_kv_heads is 3 and N is 3",
        ),
        (torch.zeros(5, 2, 4, 3, 9), SPEC, "(B, 2, N, H, D), but D is 9 in the tensor, head_size is 8."),
        (torch.zeros(5, 3, 4, 24), SPEC, "(B, H, N, 2D), but 2D is 24 in the tensor, 2 * head_size is 16."),
        (
            (torch.zeros(21, 3, 8), torch.zeros(21, 3, 8)),
            SPEC,
            "but 21 slots are no multiple of block_size, 4.",
        ),
    ],
)
def test_a_shape_that_does_not_fit_is_told_by_the_axis_that_differs(
    cache: Any, spec: KVSpec, text: str
) -> None:
    with pytest.raises(LayoutError) as caught:
        describe_layers({"a": cache}, spec)
    told = str(caught.value)
    assert told.startswith("layer 'a' is nearest to ")
    assert text in told
    assert all(word in told for word in ("opaque_tag", "N a token of the block", "correct the spec"))


def test_a_shape_that_is_like_no_layout_names_none_as_nearest() -> None:
    with pytest.raises(LayoutError, match=r"^layer 'a': shape \(7,\).*opaque_tag"):
        describe_layers({"a": torch.zeros(7)}, SPEC)


def test_layers_on_different_devices_are_refused() -> None:
    caches = {"near": torch.zeros(2, 5, 4, 3, 8), "far": torch.zeros(2, 5, 4, 3, 8, device="meta")}
    with pytest.raises(LayoutError, match=r"'far'.*meta.*first is on cpu"):
        describe_layers(caches, SPEC)


def test_a_declared_layout_is_checked() -> None:
    with pytest.raises(LayoutError, match=r"'a'.*is not vllm_b2nhd \(B, 2, N, H, D\)"):
        describe_layers({"a": torch.zeros(2, 5, 4, 3, 8)}, SPEC, layout="vllm_b2nhd")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"layout": "nhd"}, "no layout 'nhd'; there are vllm_2bnhd"),
        ({"layout": "opaque"}, "go together"),
        ({"opaque_tag": "vec"}, "go together"),
        ({"spec": {"b": SPEC}}, r"no spec for layers \['a'\]"),
        ({"kvcaches": {}}, "no layers"),
        ({"kvcaches": None}, "kvcaches is of type NoneType; register a mapping"),
        ({"kvcaches": torch.zeros(2, 5, 4, 3, 8)}, "kvcaches is of type Tensor"),
        ({"kvcaches": {3: torch.zeros(2, 5, 4, 3, 8)}}, "layer 3: the name is int"),
        ({"kvcaches": {"a": None}}, r"expected a strided tensor.*got \['NoneType'\]"),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(arguments: dict[str, object], reason: str) -> None:
    with pytest.raises(LayoutError, match=reason):
        describe_layers(**{"kvcaches": {"a": torch.zeros(2, 5, 4, 3, 8)}, "spec": SPEC, **arguments})


@pytest.mark.parametrize("numbers", [("3", 8, 4), (3, 8.0, 4), (3, 8, True), (3, 8, None)])
def test_a_spec_of_anything_but_whole_numbers_is_refused(numbers: tuple[Any, ...]) -> None:
    with pytest.raises(LayoutError, match="whole numbers of 1 or more"):
        KVSpec(*numbers)


@pytest.mark.parametrize("numbers", [(0, 8, 4), (3, 0, 4), (3, 8, 0), (3, 8, -4), (2, 8, 4, True)])
def test_an_impossible_spec_is_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match=r"must be (whole numbers of )?1"):
        KVSpec(*numbers)


def test_a_layer_that_shares_memory_is_left_out_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    cache = torch.zeros(2, 5, 4, 3, 8)
    with caplog.at_level(logging.INFO, "lwkv"):
        layers = describe_layers({"a": cache, "b": torch.zeros(2, 5, 4, 3, 8), "c": cache}, SPEC)
    assert [layer.name for layer in layers] == ["a", "b"]
    assert "'c' shares the KV memory of 'a'" in caplog.text


def test_layers_that_share_memory_in_different_forms_are_refused() -> None:
    cache = torch.zeros(2, 5, 4, 3, 8)
    with pytest.raises(LayoutError, match=r"'b'.*same address as a"):
        describe_layers({"a": cache, "b": cache[:, :4]}, SPEC)
    k, v = torch.zeros(20, 3, 8), torch.zeros(20, 3, 8)
    with pytest.raises(LayoutError, match=r"'b'.*same address as a"):
        describe_layers({"a": (k, v), "b": (v, k)}, SPEC)


def test_k_and_v_of_a_pair_step_alike() -> None:
    """One number serves both as the distance of their blocks."""
    k, v = torch.zeros(20, 3, 8), torch.zeros(20, 3, 9)[..., :8]
    with pytest.raises(LayoutError, match=r"'a'.*K and V differ in shape, strides or dtype"):
        describe_layers({"a": (k, v)}, SPEC)
    k, v = torch.zeros(20, 1, 8), torch.zeros(20, 8).as_strided((20, 1, 8), (8, 5, 1))
    assert describe_layers({"a": (k, v)}, KVSpec(1, 8, 4))


def test_opaque_blocks_are_rows_of_raw_elements() -> None:
    cache = put(torch.arange(5 * 3 * 4 * 16, dtype=torch.bfloat16).view(5, 3, 4, 16))
    (layer,) = describe_layers({"a": cache}, SPEC, layout="opaque", opaque_tag="cpu-vec")
    assert layer.page_format == "opaque:3x4x16:4:cpu-vec"
    assert (layer.k.shape, layer.v, layer.tokens_per_row) == ((5, 1, 1, 192), None, 4)
    assert (layer.num_rows, layer.page_bytes(8)) == (5, 2 * 192 * 2)
    assert same_bits(layer.k.flatten(1), cache.flatten(1))
    with pytest.raises(ConfigError, match=r"whole blocks of 4 tokens.*got 6"):
        layer.page_bytes(6)


def test_opaque_blocks_may_be_padded_and_come_as_a_pair() -> None:
    cache = torch.arange(2 * 5 * 100, dtype=torch.float32).view(2, 5, 100)
    pair = tuple(cache[part, :, :96].view(5, 3, 4, 8) for part in range(2))
    (layer,) = describe_layers([pair], SPEC, layout="opaque", opaque_tag="x")
    assert layer.page_format == "opaque:3x4x8+3x4x8:4:x"
    assert same_bits(layer.v.view(torch.float32)[4, 0, 0], cache[1, 4, :96])


def test_opaque_blocks_that_are_not_contiguous_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"'a'.*register them as a pair"):
        describe_layers({"a": torch.zeros(2, 5, 96).transpose(0, 1)}, SPEC, "opaque", "vec")


def test_words_mind_where_the_memory_starts() -> None:
    memory = torch.zeros(2 * 3 * 4 * 8 + 8, dtype=torch.uint8).numpy().data
    start = next(
        n for n in range(1, 3) if torch.frombuffer(memory, dtype=torch.uint8, offset=n).data_ptr() % 2
    )
    cache = torch.frombuffer(memory, dtype=torch.uint8, offset=start)[: 2 * 3 * 4 * 8].view(2, 3, 4, 1, 8)
    (layer,) = describe_layers([cache], KVSpec(1, 8, 4))
    assert layer.words[0].element_size() == 1


def test_words_mind_the_strides_of_single_elements_too() -> None:
    cache = torch.zeros(99, dtype=torch.bfloat16).as_strided((2, 2, 2, 1, 8), (32, 16, 8, 9, 1))
    (layer,) = describe_layers([cache], KVSpec(1, 8, 2), layout="vllm_2bnhd")
    assert layer.words[0].element_size() == 2


@pytest.mark.parametrize(
    ("head_size", "gap", "offset", "word"),
    [(8, 0, 0, 8), (8, 2, 0, 4), (8, 0, 1, 2), (7, 0, 0, 2), (4, 0, 4, 8)],
)
def test_words_are_as_wide_as_sizes_strides_and_addresses_allow(
    head_size: int, gap: int, offset: int, word: int
) -> None:
    spec = KVSpec(3, head_size, 4)
    cache = put(arrange("vllm_2bnhd", make_kv(spec, 5, torch.bfloat16)), gap=gap, offset=offset)
    (layer,) = describe_layers([cache], spec)
    k, v = layer.words
    assert (k.element_size(), v.element_size()) == (word, word)
    assert (k.data_ptr(), v.data_ptr()) == (layer.k.data_ptr(), layer.v.data_ptr())
