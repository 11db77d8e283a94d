"""Lossless pages: every bit comes back, the bytes are those of the description, and bad pages do no harm."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from page_coders import MakeCoder, decoded, encoded
from torch import Tensor

from lwkv.codecs.lossless_form import ELEMENTS_PER_ESCAPE, GROUP, LosslessForm
from lwkv.codecs.torch_lossless import TorchLossless

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "lossless_pages.json").read_text())
SPECIAL = [0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81, 0x3F80, 0xBF80, 0x0080]


def gaussian(form: LosslessForm, pages: int = 2, seed: int = 0) -> Tensor:
    """Raw pages as a model's are: rows of one scale, with channels that stand out; uint8 [pages, bytes]."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(pages, form.rows, form.width, generator=generator)
    values *= (3 * torch.rand(form.width, generator=generator)).exp()
    return values.bfloat16().view(torch.uint8).view(pages, -1)


def as_page(form: LosslessForm, bits: list[int]) -> Tensor:
    """A raw page that begins with these elements and goes on with zeros."""
    page = np.zeros(form.rows * form.width, np.uint16)
    page[: len(bits)] = bits
    return torch.from_numpy(page.view(np.uint8))[None]


def reference(form: LosslessForm, raw: Tensor) -> bytes:
    """One coded page as the documents describe it, element by element."""
    elements = raw.numpy().view(np.uint16).reshape(form.rows, form.width).tolist()
    rows = [*elements, *[[0] * form.width] * (form.groups * GROUP - form.rows)]
    tops, codes, signs, escapes, starts = [], [], [], [], []
    for number, row in enumerate(rows):
        if number % GROUP == 0:
            starts.append(len(escapes))
        top = max((x >> 7) & 255 for x in row)
        tops.append(top)
        for x in row:
            exponent = (x >> 7) & 255
            code = 14 if exponent == 0 else min(top - exponent, 14)
            code = 15 if exponent and code == 14 else code
            codes.append(code)
            signs.append((x >> 15) << 7 | x & 127)
            escapes += [exponent] * (code == 15)
    starts += [len(escapes)] * (form.num_starts - len(starts))
    header = np.array(form.header(len(escapes)), "<i4").tobytes()
    pairs = [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
    page = header + np.array(starts, "<i4").tobytes() + bytes(tops) + bytes(pairs) + bytes(signs)
    return (page + bytes(escapes[: form.capacity])).ljust(form.page_bytes, b"\0")


FORMS = st.builds(LosslessForm, rows=st.integers(1, 40), width=st.integers(1, 9).map(lambda n: 2 * n))
BITS = st.one_of(st.sampled_from(SPECIAL), st.integers(0, 0xFFFF), st.integers(0x3F00, 0x40FF))


@given(form=FORMS, bits=st.lists(BITS, max_size=300))
@settings(max_examples=60, deadline=None)
def test_any_bits_come_back_and_are_coded_as_described(form: LosslessForm, bits: list[int]) -> None:
    raw = as_page(form, bits[: form.rows * form.width])
    coder = TorchLossless(form)
    coded = encoded(coder, raw)
    assert coded.numpy().tobytes() == reference(form, raw)
    assert coder.whole(coded[:, : form.head_bytes].numpy()).all()
    assert torch.equal(decoded(coder, coded), raw)


@pytest.mark.parametrize(
    "form", [LosslessForm(16, 8), LosslessForm(33, 6), LosslessForm(5, 80), LosslessForm(70, 2)]
)
@pytest.mark.parametrize("kind", ["like a model's", "random bits", "special values", "zeros"])
def test_every_coder_writes_the_same_bytes_and_gives_the_same_back(
    form: LosslessForm, kind: str, make_coder: MakeCoder, run: Callable, device: torch.device
) -> None:
    random = np.random.default_rng(3)
    shape = 3, form.rows * form.width
    raw = {
        "like a model's": lambda: gaussian(form, 3),
        "random bits": lambda: torch.from_numpy(random.integers(0, 256, (3, form.raw_bytes), np.uint8)),
        "special values": lambda: torch.from_numpy(
            random.choice(np.array(SPECIAL, np.uint16), shape).view(np.uint8)
        ),
        "zeros": lambda: torch.zeros(3, form.raw_bytes, dtype=torch.uint8),
    }[kind]()
    coder, found = make_coder(form), []
    run(lambda: found.append(encoded(coder, raw.to(device))))
    run(lambda: found.append(decoded(coder, found[0])))
    coded, back = (tensor.cpu() for tensor in found)
    assert [page.numpy().tobytes() for page in coded] == [reference(form, page[None]) for page in raw]
    fits = coder.whole(coded[:, : form.head_bytes].numpy())
    assert (coder.fits(coded[:, : coder.header_bytes].numpy()) == fits).all()
    assert torch.equal(back[torch.from_numpy(fits)], raw[torch.from_numpy(fits)])
    assert fits.all() or kind != "like a model's"


def test_a_page_with_too_many_escapes_says_so(
    make_coder: MakeCoder, run: Callable, device: torch.device
) -> None:
    """One row whose top is far above the rest is no harm; a page full of such rows has no room for them."""
    form = LosslessForm(1024, 16)
    steep = np.tile(np.array([0x7F00, *[0x0100] * 15], np.uint16), form.rows)
    one = np.full(form.rows * form.width, 0x3F80, np.uint16)
    one[:16] = steep[:16]
    raw = torch.from_numpy(np.stack([steep, one]).view(np.uint8)).to(device)
    coder, found = make_coder(form), []
    run(lambda: found.append(encoded(coder, raw)))
    heads = found[0][:, : form.head_bytes].cpu().numpy()
    assert coder.whole(heads).tolist() == [False, True]
    assert coder.fits(heads[:, : coder.header_bytes]).tolist() == [False, True]
    assert heads.view("<i4")[:, 5].tolist() == [15 * 1024, 15]
    # It is never decoded; if it were, nothing beside its own page is written.
    run(lambda: found.append(decoded(coder, found[0])))
    assert torch.equal(found[1][1], raw[1])


def test_pages_that_are_not_of_the_form_are_not_whole() -> None:
    form = LosslessForm(70, 16)
    coder = TorchLossless(form)
    good = encoded(coder, gaussian(form, 1))[:, : form.head_bytes].numpy()
    assert coder.whole(good).all()
    for at in range(form.head_bytes // 4):
        bad = good.copy()
        bad.view("<i4")[0, at] += 1 << 20
        assert not coder.whole(bad).any(), f"word {at}"
        assert coder.fits(bad[:, : coder.header_bytes]).all() == (at >= coder.header_bytes // 4), f"word {at}"
    assert not coder.whole(np.zeros_like(good)).any()
    assert not coder.whole(np.full_like(good, 255)).any()
    assert not TorchLossless(LosslessForm(70, 14)).whole(good).any()


@pytest.mark.parametrize("seed", range(3))
def test_decoding_whatever_bytes_writes_its_own_pages_only(
    seed: int, make_coder: MakeCoder, run: Callable, device: torch.device
) -> None:
    form = LosslessForm(21, 6)
    coder = make_coder(form)
    random = np.random.default_rng(seed).integers(0, 256, (2, form.page_bytes), np.uint8)
    coded = torch.from_numpy(random).to(device)
    raw = torch.full((4 * form.raw_bytes,), 0x5A, dtype=torch.uint8, device=device)
    run(lambda: coder.decode(coded.flatten(), raw[form.raw_bytes :], 2))
    assert raw[: form.raw_bytes].eq(0x5A).all()
    assert raw[3 * form.raw_bytes :].eq(0x5A).all()


def test_pages_of_models_take_about_three_quarters() -> None:
    """Llama-8B's, SmolLM2's, and one of DeepSeek's MLA."""
    for form in (LosslessForm(2 * 256 * 8, 128), LosslessForm(2 * 256 * 3, 64), LosslessForm(256, 576)):
        assert 0.75 < form.page_bytes / form.raw_bytes < 0.78
        assert form.page_bytes % 4096 == 0
        assert form.capacity >= form.rows * form.width / ELEMENTS_PER_ESCAPE


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['rows']}x{case['width']}")
def test_the_bytes_of_a_page_never_change(case: dict, make_coder: MakeCoder, device: torch.device) -> None:
    """These pages are on disks and servers: other bytes need another version, which is part of the keys."""
    form = LosslessForm(case["rows"], case["width"])
    coder = make_coder(form)
    raw = as_page(form, case["elements"]).to(device)
    coded = encoded(coder, raw).cpu().numpy().tobytes()
    assert len(coded) == case["page_bytes"]
    assert coded.rstrip(b"\0").hex() == case["coded"]
    assert hashlib.sha256(coded).hexdigest() == case["sha256"]
