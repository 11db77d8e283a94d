"""Pages of fp8: values rounded as described, the same bytes everywhere, and a second time nothing changes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from page_coders import MakeCoder, decoded, encoded
from torch import Tensor

from lwkv.codecs.fp8_form import KINDS, Fp8Form
from lwkv.codecs.page_form import HEADER_BYTES
from lwkv.codecs.torch_fp8 import TorchFp8

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "fp8_pages.json").read_text())
WORDS = {2: np.uint16, 4: np.uint32}
SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    math.inf,
    -math.inf,
    math.nan,
    448.0,
    1e-30,
    0.0625,
    3e38,
    65504.0,
    1e-40,
    6e-8,
]


def as_page(form: Fp8Form, bits: list[int]) -> Tensor:
    """A raw page that begins with these elements and goes on with zeros."""
    page = np.zeros(form.rows * form.width, WORDS[form.dtype.itemsize])
    page[: len(bits)] = bits
    return torch.from_numpy(page.view(np.uint8))[None]


def of_values(form: Fp8Form, values: Tensor) -> Tensor:
    """Raw pages of floats [pages, rows, width]."""
    return values.to(form.dtype).contiguous().view(torch.uint8).view(len(values), -1)


def values_of(form: Fp8Form, raw: Tensor) -> Tensor:
    """The opposite, as float64."""
    return raw.contiguous().view(form.dtype).double().view(len(raw), form.rows, form.width)


def exponent_of(value: Fraction) -> int:
    """Of the power of two at or below it."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if value >= Fraction(2) ** exponent else exponent - 1


def reference(form: Fp8Form, raw: Tensor) -> bytes:
    """One coded page as the documents describe it, element by element, in exact arithmetic."""
    largest = 15 if form.dtype == torch.float16 else 127
    tops, codes = [], []
    for row in values_of(form, raw)[0].tolist():
        finite = [Fraction(abs(x)) for x in row if math.isfinite(x) and abs(x) >= 2.0**-126]
        top = 0
        if finite:
            unit = Fraction(2) ** (exponent_of(max(finite)) - 3)
            top = min(exponent_of(round(max(finite) / unit) * unit), largest) + 127
        tops.append(top)
        codes += [code_of(x, top) for x in row]
    page = form.header.tobytes() + bytes(tops).ljust(form.codes_at - form.tops_at, b"\0") + bytes(codes)
    return page.ljust(form.page_bytes, b"\0")


def code_of(value: float, top: int) -> int:
    if math.isnan(value):
        return 0x7F
    sign = 0x80 if math.copysign(1, value) < 0 else 0
    if math.isinf(value):
        return sign | 0x78
    if abs(value) < 2.0**-126:
        return sign
    scaled = Fraction(abs(value)) * Fraction(2) ** (134 - top)
    exponent = max(exponent_of(scaled), -6)
    steps = round(scaled / Fraction(2) ** (exponent - 3))  # ties to even
    return sign | min((exponent + 6) * 8 + steps, 0x77)


FORMS = st.builds(Fp8Form, rows=st.integers(1, 5), width=st.integers(1, 9), dtype=st.sampled_from([*KINDS]))
NEAR_ONE = st.floats(-4, 4, width=32)
NUMBERS = st.one_of(st.sampled_from(SPECIAL), NEAR_ONE, st.floats(width=32))


@given(form=FORMS, numbers=st.lists(NUMBERS, max_size=45))
@settings(max_examples=150, deadline=None)
def test_numbers_are_coded_as_described_and_stay_the_same_from_then_on(
    form: Fp8Form, numbers: list[float]
) -> None:
    values = torch.zeros(form.rows * form.width)
    values[: len(numbers)] = torch.tensor(numbers[: len(values)])
    raw, coder = of_values(form, values.view(1, form.rows, form.width)), TorchFp8(form)
    # A float32 denormal is none in bfloat16: what is kept is below 2 ** -126 either way.
    coded = encoded(coder, raw)
    assert coded.numpy().tobytes() == reference(form, raw)
    assert coder.whole(coded[:, :HEADER_BYTES].numpy()).all()
    back = decoded(coder, coded)
    again = decoded(coder, encoded(coder, back))
    assert torch.equal(again, back)
    check_values(form, values_of(form, raw), values_of(form, back))


def check_values(form: Fp8Form, before: Tensor, after: Tensor) -> None:
    """NaN, infinities and signs are kept, others rounded: by 1/16, or 2 ** -16 of the largest."""
    assert torch.equal(before.isnan(), after.isnan())
    assert torch.equal(before.isinf(), after.isinf())
    numbers = ~before.isnan()
    assert torch.equal(before.signbit()[numbers], after.signbit()[numbers])
    finite = torch.where(before.isfinite(), before, 0.0)
    largest = finite.abs().amax(2, keepdim=True).expand_as(finite)
    allowed = torch.maximum(finite.abs() / 16, largest * 2.0**-16).clamp_min(2.0**-125)
    near_top = finite.abs() >= torch.finfo(form.dtype).max * 0.96
    error = (torch.where(after.isfinite(), after, 0.0) - finite).abs()
    assert (error <= torch.where(near_top, finite.abs() / 15, allowed)).all()


@pytest.mark.parametrize("dtype", [*KINDS], ids=str)
def test_codes_are_those_of_torch(dtype: torch.dtype) -> None:
    """Where a row is divided by its power of two, these are torch's own float8_e4m3fn."""
    form = Fp8Form(64, 128, dtype)
    values = torch.randn(1, 64, 128, generator=torch.Generator().manual_seed(4)).to(dtype)
    coded = encoded(TorchFp8(form), of_values(form, values))[0]
    tops = coded[form.tops_at : form.tops_at + 64].double()[:, None]
    wanted = (values[0].double() * torch.exp2(134 - tops)).float().to(torch.float8_e4m3fn)
    assert torch.equal(coded[form.codes_at : form.codes_end].view(64, 128), wanted.view(torch.uint8))


@pytest.mark.parametrize("dtype", [*KINDS], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(16, 8), (33, 6), (5, 80), (7, 3)])
@pytest.mark.parametrize("kind", ["like a model's", "random bits", "special values", "zeros"])
def test_every_coder_writes_the_same_bytes_and_gives_the_same_back(
    kind: str,
    rows: int,
    width: int,
    dtype: torch.dtype,
    make_fp8: MakeCoder,
    run: Callable,
    device: torch.device,
) -> None:
    form, random = Fp8Form(rows, width, dtype), np.random.default_rng(3)
    shape = 3, rows, width
    raw = {
        "like a model's": lambda: of_values(form, torch.from_numpy(random.normal(size=shape))),
        "random bits": lambda: torch.from_numpy(random.integers(0, 256, (3, form.raw_bytes), np.uint8)),
        "special values": lambda: of_values(form, torch.from_numpy(random.choice(SPECIAL, shape))),
        "zeros": lambda: torch.zeros(3, form.raw_bytes, dtype=torch.uint8),
    }[kind]()
    coder, found = make_fp8(form), []
    run(lambda: found.append(encoded(coder, raw.to(device))))
    run(lambda: found.append(decoded(coder, found[0])))
    coded, back = (tensor.cpu() for tensor in found)
    assert [page.numpy().tobytes() for page in coded] == [reference(form, page[None]) for page in raw]
    assert coder.fits(coded[:, : coder.header_bytes].numpy()).all()
    assert torch.equal(back, decoded(TorchFp8(form), coded))
    check_values(form, values_of(form, raw), values_of(form, back))


@pytest.mark.parametrize("dtype", [*KINDS], ids=str)
def test_nan_and_infinities_come_back_and_change_nothing_else_in_their_row(
    dtype: torch.dtype, make_fp8: MakeCoder, run: Callable, device: torch.device
) -> None:
    form = Fp8Form(2, 64, dtype)
    plain = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(1)) * 1e-3
    plain[0, :, 7:10] = 0
    hostile = plain.clone()
    hostile[0, 0, 7:10] = torch.tensor([math.nan, math.inf, -math.inf])
    coder, found = make_fp8(form), []
    raw = of_values(form, torch.cat([plain, hostile])).to(device)
    run(lambda: found.append(encoded(coder, raw)))
    run(lambda: found.append(decoded(coder, found[0])))
    one, other = values_of(form, found[1].cpu())
    assert other[0, 7].isnan()
    assert other[0, 8:10].tolist() == [math.inf, -math.inf]
    other[0, 7:10] = 0
    assert torch.equal(one, other)


def test_a_row_of_denormals_comes_back_as_zeros_with_their_signs() -> None:
    form = Fp8Form(1, 4, torch.bfloat16)
    back = decoded(TorchFp8(form), encoded(TorchFp8(form), as_page(form, [0x0001, 0x807F, 0x0000, 0x8000])))
    assert back.view(torch.int16).tolist() == [[0, -0x8000, 0, -0x8000]]
    # float16 has its denormals among float32's usual numbers.
    form = Fp8Form(1, 2, torch.float16)
    back = decoded(TorchFp8(form), encoded(TorchFp8(form), as_page(form, [0x0001, 0x8300])))
    assert back.view(torch.int16).tolist() == [[0x0001, 0x8300 - 0x10000]]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dtype", [*KINDS], ids=str)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")  # Triton's interpreter
def test_decoding_whatever_bytes_writes_its_own_pages_only(
    seed: int, dtype: torch.dtype, make_fp8: MakeCoder, run: Callable, device: torch.device
) -> None:
    form = Fp8Form(21, 6, dtype)
    coder = make_fp8(form)
    random = np.random.default_rng(seed).integers(0, 256, (2, form.page_bytes), np.uint8)
    coded = torch.from_numpy(random).to(device)
    raw = torch.full((4 * form.raw_bytes + 16,), 0x5A, dtype=torch.uint8, device=device)
    start = -(-form.raw_bytes // 16) * 16
    run(lambda: coder.decode(coded.flatten(), raw[start:], 2))
    assert raw[:start].eq(0x5A).all()
    assert raw[start + 2 * form.raw_bytes :].eq(0x5A).all()
    found = raw[start : start + 2 * form.raw_bytes].cpu().view(2, -1)
    assert torch.equal(found, decoded(TorchFp8(form), coded.cpu()))


def test_pages_that_are_not_of_the_form_are_not_whole() -> None:
    form = Fp8Form(70, 16, torch.bfloat16)
    coder = TorchFp8(form)
    good = encoded(coder, torch.zeros(1, form.raw_bytes, dtype=torch.uint8))[:, :HEADER_BYTES].numpy()
    for at in range(HEADER_BYTES // 4):
        bad = good.copy()
        bad.view("<i4")[0, at] += 1
        assert not coder.whole(bad).any(), f"word {at}"
        assert not coder.fits(bad).any(), f"word {at}"
    assert not coder.whole(np.zeros_like(good)).any()
    assert not TorchFp8(Fp8Form(70, 16, torch.float16)).whole(good).any()


def test_pages_of_models_take_about_half() -> None:
    """Llama-8B's, SmolLM2's, and one of DeepSeek's MLA."""
    for rows, width in ((2 * 256 * 8, 128), (2 * 256 * 3, 64), (256, 576)):
        form = Fp8Form(rows, width, torch.bfloat16)
        assert 0.5 < form.page_bytes / form.raw_bytes < 0.525
        assert form.page_bytes % 4096 == 0


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["dtype"])
def test_the_bytes_of_a_page_never_change(case: dict, make_fp8: MakeCoder, device: torch.device) -> None:
    """These pages are on disks and servers: other bytes need another version, which is part of the keys."""
    form = Fp8Form(case["rows"], case["width"], getattr(torch, case["dtype"]))
    raw = as_page(form, case["elements"]).to(device)
    coded = encoded(make_fp8(form), raw).cpu().numpy().tobytes()
    assert len(coded) == case["page_bytes"]
    assert coded.rstrip(b"\0").hex() == case["coded"]
    assert hashlib.sha256(coded).hexdigest() == case["sha256"]
