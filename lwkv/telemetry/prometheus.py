"""The numbers of an engine in the text format of Prometheus; nothing listens, the caller serves it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from operator import itemgetter

from lwkv.telemetry.tier_meter import BOUNDS_US

Sample = tuple[tuple[str, str], str]
"""A metric's name and type, and one line of it."""


def prometheus_text(
    counts: Mapping[str, int], gauges: Mapping[str, int], tiers: Sequence[str], **labels: str
) -> str:
    """Write numbers as metrics called lwkv_..., those of a tier lwkv_tier_... with its name.

    Args:
        counts: `CacheEngine.counts()`.
        gauges: what else is in `CacheEngine.stats()`; it may fall.
        tiers: `CacheEngine.tier_names`.
        labels: go to every metric.
    """
    samples: list[Sample] = []
    for numbers, rows in ((counts, _count_samples), (gauges, _gauge_samples)):
        rest = dict(numbers)
        for tier in tiers:
            names = [name for name in rest if name.startswith(f"{tier}_")]
            own = {name.removeprefix(f"{tier}_"): rest.pop(name) for name in names}
            samples += rows("lwkv_tier", own, {**labels, "tier": tier})
        samples += rows("lwkv", rest, labels)
    lines: list[str] = []
    for (name, kind), group in groupby(sorted(samples, key=itemgetter(0)), key=itemgetter(0)):
        lines += [f"# TYPE {name} {kind}", *(line for _, line in group)]
    return "".join(f"{line}\n" for line in lines)


def _count_samples(prefix: str, counts: Mapping[str, int], labels: Mapping[str, str]) -> Iterator[Sample]:
    timed = [kind for kind in ("get", "put") if f"{kind}_calls" in counts]
    for kind in timed:
        yield from _histogram(f"{prefix}_{kind}_seconds", counts, kind, labels)
    inside = tuple(f"{kind}_us" for kind in timed)
    for name, number in counts.items():
        if not name.startswith(inside):
            yield (f"{prefix}_{name}_total", "counter"), _line(f"{prefix}_{name}_total", number, labels)


def _gauge_samples(prefix: str, gauges: Mapping[str, int], labels: Mapping[str, str]) -> Iterator[Sample]:
    for name, number in gauges.items():
        yield (f"{prefix}_{name}", "gauge"), _line(f"{prefix}_{name}", number, labels)


def _line(name: str, number: int, labels: Mapping[str, str]) -> str:
    return f"{name}{_braces(labels.items())} {number}"


def _histogram(name: str, stats: Mapping[str, int], kind: str, labels: Mapping[str, str]) -> Iterator[Sample]:
    family = (name, "histogram")
    counts = [stats.get(f"{kind}_us_le_{bound}", 0) for bound in (*BOUNDS_US, "inf")]
    bounds = [*(f"{bound / 1e6:g}" for bound in BOUNDS_US), "+Inf"]
    for bound, count in zip(bounds, accumulate(counts), strict=True):
        yield family, f"{name}_bucket{_braces([*labels.items(), ('le', bound)])} {count}"
    yield family, f"{name}_sum{_braces(labels.items())} {stats[f'{kind}_us'] / 1e6:g}"
    yield family, f"{name}_count{_braces(labels.items())} {stats[f'{kind}_calls']}"


def _braces(labels: Iterable[tuple[str, str]]) -> str:
    escape = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    inside = ",".join(f'{name}="{value.translate(escape)}"' for name, value in labels)
    return f"{{{inside}}}" if inside else ""
