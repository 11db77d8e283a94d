"""The doctor's look at the platforms, the one that is used, its device and link: all that needs torch."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

import torch

from lwkv.cli.doctor.link import measure_link
from lwkv.cli.doctor.report import Report
from lwkv.cli.platform_choice import why_chosen
from lwkv.errors import PlatformMissingError
from lwkv.kernels import choose_kernels
from lwkv.platforms import Platform, detect_platform, open_platform, platform_names
from lwkv.platforms.registry import ask_platform


def examine_platforms(report: Report, override: str | None) -> None:
    """Fill in the platforms, and the device of the one called `override`, or chosen as always."""
    report.versions["torch"] = torch.__version__
    report.candidates = {name: _verdict(name) for name in platform_names()}
    try:
        chosen = detect_platform(override)
    except (ValueError, RuntimeError) as error:
        report.faults.append(str(error))
        return
    report.platform, report.why = chosen.name, why_chosen(override)
    try:
        ask_platform(chosen, partial(_examine_device, report, chosen))
    except PlatformMissingError as error:
        report.faults.append(str(error))


def _verdict(name: str) -> str:
    try:
        found = open_platform(name)
        count = ask_platform(found, found.device_count)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return f"available, {count} device{'s' if count > 1 else ''}"


def _examine_device(report: Report, platform: Platform) -> None:
    report.features = asdict(platform.features)
    device = platform.current_device()
    report.device = str(device)
    report.device_free, report.device_total = platform.mem_info(device) or (None, None)
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
