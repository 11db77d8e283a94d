"""What `lwkv doctor` found, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Report:
    """What the doctor found; None where it could not look. Bytes, and bytes a second."""

    versions: dict[str, str | None]
    settings: dict[str, str] = field(default_factory=dict)
    configuration: dict[str, dict[str, str]] = field(default_factory=dict)
    candidates: dict[str, str] = field(default_factory=dict)
    platform: str | None = None
    why: str = ""
    features: dict[str, bool] = field(default_factory=dict)
    device: str | None = None
    device_free: int | None = None
    device_total: int | None = None
    page_locked: str | None = None
    kernels: str | None = None
    load_speed: float | None = None
    save_speed: float | None = None
    memory: dict[str, str] = field(default_factory=dict)
    tiers: dict[str, dict[str, str]] = field(default_factory=dict)
    model: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


def lines(report: Report) -> Iterator[str]:
    """The report as text."""
    yield from _section("Versions", {name: found or "-" for name, found in report.versions.items()})
    if report.settings:
        yield from _section("Settings", report.settings)
    if report.configuration:
        yield from _section("Every setting, and where it comes from", _setting_rows(report.configuration))
    if report.candidates:
        yield from _section("Platforms, in the order they are looked for", report.candidates)
    if report.platform:
        yield from _section(
            "Used", {"platform": report.platform, "because": report.why, **_device_rows(report)}
        )
        features = {name: _feature(name, on) for name, on in report.features.items()}
        if features:
            yield from _section(f"What {report.platform} can do", features)
    if report.load_speed and report.save_speed:
        kind = "memory copy" if report.platform == "cpu" else "link"
        speeds = {"load": _speed(report.load_speed), "save": _speed(report.save_speed)}
        yield from _section(f"Speed of the {kind}, 64 MiB at a time", speeds)
    if report.memory:
        yield from _section("Host memory", report.memory)
    if report.model:
        yield from _section("What the model keeps, with all heads in one worker", report.model)
    for url, rows in report.tiers.items():
        yield from _section(f"Tier {url}", rows)
    yield from _list("To note", report.advice)
    yield from _list("Faults", report.faults)


_MEANINGS = {
    "layerwise": "loads and saves beside the model, layer by layer",
    "blending": "documents in any order (docs/blending.md)",
    "host_register": "page-locks memory that is there already",
    "batch_copy": "queues many copies with one call",
    "event_timing": "times work on the device, for timelines",
    "triton": "lwkv's Triton kernels run",
    "stream_priority": "lets the model's work go first",
    "lossless_pages": "page_codec: auto takes lossless pages, which were measured to be as fast as raw",
}


def _feature(name: str, on: bool) -> str:
    return f"{'yes' if on else 'no':3}  {_MEANINGS.get(name, '')}".rstrip()


def _setting_rows(settings: dict[str, dict[str, str]]) -> dict[str, str]:
    width = max(len(setting["value"]) for setting in settings.values())
    return {name: f"{setting['value']:{width}}  {setting['source']}" for name, setting in settings.items()}


def _device_rows(report: Report) -> dict[str, str]:
    rows = {"device": f"{report.device}", "kernels": f"{report.kernels}"}
    if report.device_free is not None and report.device_total is not None:
        free, total = report.device_free / 2**30, report.device_total / 2**30
        rows["memory"] = f"{free:.1f} of {total:.1f} GiB free"
    return rows | ({"page-locking": report.page_locked} if report.page_locked else {})


def _speed(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.1f} GB/s"


def _section(title: str, rows: dict[str, str]) -> Iterator[str]:
    width = max(len(name) for name in rows)
    yield title
    yield from (f"  {name:{width}}  {value}" for name, value in rows.items())
    yield ""


def _list(title: str, items: list[str]) -> Iterator[str]:
    if items:
        yield title
        yield from ("  - " + item.replace("\n", "\n    ") for item in items)
        yield ""
