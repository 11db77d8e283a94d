"""The blend demo's findings as text and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lwkv.cli.demo.blend.play import SHARES, BlendFindings
from lwkv.reference.model_files.packages import require_package

_MEANING = {
    "deviation": "those whose KV has changed most",
    "query": "those that the question looks at",
    "prefix_k": "the first of each document",
    "random": "drawn by lot, to compare with",
}
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#999999")


def blend_lines(found: BlendFindings) -> Iterator[str]:
    """Write the findings for a reader, line by line."""
    yield f"Platform  {found.platform}"
    yield f"Model     {found.model}, {found.dtype}"
    order = ", ".join(str(number + 1) for number in found.order)
    yield f"Prompt    {found.num_prompt} tokens: documents {order}, which were cached one by one from 1 to 3"
    yield f"          ({found.num_reused} tokens), then: {found.question}"
    yield ""
    yield f"{'':18}  {'first token':>11}  {'computed':>8}  {'KL to full':>10}  answer"
    for way in found.ways:
        computed = f"{way.num_computed / found.num_prompt:.0%}"
        yield (
            f"{way.name:18}  {way.first_token_s * 1e3:8.0f} ms  {computed:>8}  {way.kl:10.4f}  {way.answer!r}"
        )
    yield ""
    yield "KL divergence from full prefill, in nats, by the share of the reused tokens that is computed again"
    yield f"{'':18}" + "".join(f"{share:>9.0%}" for share in SHARES)
    for curve in found.curves:
        yield f"{curve.name:18}" + "".join(f"{kl:9.4f}" for kl in curve.kl)
    yield "which tokens: " + "; ".join(f"{curve.name}, {_MEANING[curve.name]}" for curve in found.curves)
    yield ""
    yield from (f"Fault: {fault}" for fault in found.faults)
    yield from (f"File: {file}" for file in found.files)


def draw_curves(found: BlendFindings, path: Path) -> None:
    """Draw KL against share for each way to choose, as a PNG file."""
    require_package("matplotlib", "drawing a picture")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=130, layout="constrained")
    axes = figure.subplots()
    for curve, colour in zip(found.curves, _COLOURS, strict=True):
        label = f"{curve.name}: {_MEANING[curve.name]}"
        axes.plot([100 * share for share in SHARES], curve.kl, marker="o", label=label, color=colour)
    axes.set_xlabel("reused tokens computed again, %")
    axes.set_ylabel("KL divergence from full prefill, nats")
    axes.set_title(f"{found.model}: {found.num_reused} tokens of three documents in another order")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, title="which tokens are computed again")
    figure.savefig(path, format="png")
