"""The numbers of an engine in the text format of Prometheus; nothing listens, the caller serves it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from operator import itemgetter

from lwkv.telemetry.tier_meter import BOUNDS_US

_HELD = ("chunks", "pins", "writes_in_flight", "pages", "pages_in_use", "page_references")
_GAUGES = frozenset((*_HELD, "used_bytes", "files", "resting"))

Sample = tuple[tuple[str, str], str]
"""A metric's name and type, and one line of it."""


def is_gauge(name: str, tiers: Sequence[str]) -> bool:
    """Whether a number of `CacheEngine.stats()` tells what there is now; all others only grow."""
    tier = next((tier for tier in tiers if name.startswith(f"{tier}_")), None)
    return (name if tier is None else name.removeprefix(f"{tier}_")) in _GAUGES


def prometheus_text(stats: Mapping[str, int], tiers: Sequence[str], **labels: str) -> str:
    """Write `CacheEngine.stats()` as metrics called lwkv_..., those of a tier lwkv_tier_... with its name.

    Args:
        tiers: `CacheEngine.tier_names`.
        labels: go to every metric.
    """
    rest = dict(stats)
    samples: list[Sample] = []
    for tier in tiers:
        own = {name.removeprefix(f"{tier}_"): rest.pop(name) for name in stats if name.startswith(f"{tier}_")}
        samples += _tier_samples(own, {**labels, "tier": tier})
    samples += _samples("lwkv", rest, labels)
    lines: list[str] = []
    for (name, kind), group in groupby(sorted(samples, key=itemgetter(0)), key=itemgetter(0)):
        lines += [f"# TYPE {name} {kind}", *(line for _, line in group)]
    return "".join(f"{line}\n" for line in lines)


def _tier_samples(stats: Mapping[str, int], labels: Mapping[str, str]) -> Iterator[Sample]:
    timed = [kind for kind in ("get", "put") if f"{kind}_calls" in stats]
    for kind in timed:
        yield from _histogram(f"lwkv_tier_{kind}_seconds", stats, kind, labels)
    inside = tuple(f"{kind}_us" for kind in timed)
    yield from _samples(
        "lwkv_tier", {name: number for name, number in stats.items() if not name.startswith(inside)}, labels
    )


def _samples(prefix: str, stats: Mapping[str, int], labels: Mapping[str, str]) -> Iterator[Sample]:
    for name, number in stats.items():
        family = (f"{prefix}_{name}", "gauge") if name in _GAUGES else (f"{prefix}_{name}_total", "counter")
        yield family, f"{family[0]}{_braces(labels.items())} {number}"


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
