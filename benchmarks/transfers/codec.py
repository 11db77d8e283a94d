"""Raw, lossless and fp8 pages: loads, saves and both at once of each; the kernels of lossless ones alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from lwkv.benchmarks.bench.findings import Findings, table
from lwkv.benchmarks.bench.run import Bench
from lwkv.benchmarks.measuring.shapes import Shape
from lwkv.benchmarks.transfers.moves import Move, measure_moves
from lwkv.codecs.choice import coders_for
from lwkv.codecs.fp8_form import Fp8Form
from lwkv.codecs.lossless_form import LosslessForm
from lwkv.codecs.page_codec import Coder

WORDS, WARPS = (1024, 2048), (2, 4, 8)


@dataclass(frozen=True)
class CodecMoves:
    """One codec's moves; GB/s are of raw bytes, whatever goes over the link."""

    codec: str
    page_ratio: float
    moves: list[Move]


@dataclass(frozen=True)
class CoderSpeed:
    """Microseconds to decode and to code the pages of one layer of all tokens."""

    coder: str
    decode_us: float
    encode_us: float
    exact: bool


@dataclass(frozen=True)
class CodecSpeeds(Findings):
    """Of `tokens` tokens, values as a model's, over plain copies of their raw bytes; bytes are checked."""

    tokens: int
    codecs: list[CodecMoves]
    coders: list[CoderSpeed]

    def lines(self, absolute: bool) -> Iterator[str]:
        yield f"{self.tokens} tokens, over a plain copy of the raw bytes"
        rows = [
            [f"{item.codec}, {move.name}", f"{item.page_ratio:.3f}", f"{move.ratio:.3f}"]
            + ([f"{move.gb_s:.1f}"] if absolute else [])
            + ["exact" if move.exact else "WRONG"]
            for item in self.codecs
            for move in item.moves
        ]
        yield from table(["", "bytes", "ratio", *(["GB/s"] if absolute else []), "check"], rows)
        if absolute:
            speeds = [
                [
                    item.coder,
                    f"{item.decode_us:.0f}",
                    f"{item.encode_us:.0f}",
                    "exact" if item.exact else "WRONG",
                ]
                for item in self.coders
            ]
            yield from table(["one layer", "decode, us", "code, us", "check"], speeds)

    def faults(self) -> Iterator[str]:
        for item in self.codecs:
            for move in item.moves:
                if not move.exact:
                    yield f"{item.codec} pages, {move.name}: what was loaded differs from what was stored"
        for coder in self.coders:
            if not coder.exact:
                yield f"{coder.coder}: decoded pages differ from those that were coded"


def measure_codec(bench: Bench) -> CodecSpeeds:
    """Move a prompt with each codec; then decode and code a layer's pages with each tuning of the kernels."""
    bench = replace(bench, shape=replace(bench.shape, dtype=torch.bfloat16))
    form = _form(bench.shape)
    fp8 = Fp8Form(form.rows, form.width, torch.bfloat16)
    sizes = {
        "raw": 1.0,
        "lossless": form.page_bytes / form.raw_bytes,
        "fp8": fp8.page_bytes / fp8.raw_bytes,
    }
    codecs = [
        CodecMoves(name, size, measure_moves(replace(bench, page_codec=name)).moves)
        for name, size in sizes.items()
    ]
    coders = [_measure_coder(bench, name, coder) for name, coder in _coders(bench, form)]
    return CodecSpeeds(bench.prefix, codecs, coders)


def _form(shape: Shape) -> LosslessForm:
    rows = (1 if shape.use_mla else 2) * shape.chunk_size * shape.num_kv_heads
    return LosslessForm(rows, shape.head_size)


def _coders(bench: Bench, form: LosslessForm) -> Iterator[tuple[str, Coder]]:
    if not bench.platform.features.triton:
        yield "torch", coders_for(bench.platform)(form)
        return
    from lwkv.codecs.triton.lossless import LosslessTuning, TritonLossless

    for words, warps in product(WORDS, WARPS):
        tuning = LosslessTuning(
            decode_words=words, decode_warps=warps, encode_words=words, encode_warps=warps
        )
        yield f"{words} words at once, {warps} warps", TritonLossless(form, tuning)


def _measure_coder(bench: Bench, name: str, coder: Coder) -> CoderSpeed:
    """All layers in turn, so that no cache on the device holds what is read."""
    pages, layers = bench.prefix // bench.shape.chunk_size, bench.shape.num_layers
    raw = [_like_a_model(bench, pages * coder.raw_bytes) for _ in range(layers)]
    coded = [raw[0].new_empty(pages * coder.page_bytes) for _ in range(layers)]
    back = [torch.zeros_like(each) for each in raw]
    handle = bench.platform.launch_handle(bench.platform.current_stream(bench.device))
    handle = handle if coder.takes_handles else None

    def all_layers(work: Callable[..., None], sources: list[Tensor], targets: list[Tensor]) -> None:
        for source, target in zip(sources, targets, strict=True):
            work(source, target, pages, handle)

    works = [partial(all_layers, coder.encode, raw, coded), partial(all_layers, coder.decode, coded, back)]
    encoded, decoded = (statistics.median(times) * 1e3 / layers for times in bench.alternate_ms(works))
    exact = all(torch.equal(a, b) for a, b in zip(raw, back, strict=True))
    return CoderSpeed(name, decoded, encoded, exact)


def _like_a_model(bench: Bench, num_bytes: int) -> Tensor:
    rows = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=bench.device).view(
        -1, bench.shape.head_size
    )
    rows.normal_()
    rows.mul_(torch.rand(bench.shape.head_size, device=bench.device).mul(3).exp())
    return rows.view(torch.uint8).flatten()
