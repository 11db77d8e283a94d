"""What a run found, as one JSON document and as text."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform as python_platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from lwkv import __version__
from lwkv.benchmarks.bench.findings import Findings
from lwkv.benchmarks.bench.parts import PARTS
from lwkv.benchmarks.bench.run import Bench
from lwkv.kernels import choose_kernels

SCHEMA = 1
_PACKAGES = ("torch", "numpy", "triton", "lmcache")


@dataclass
class Result:
    """One run; docs/benchmarks.md describes the JSON."""

    bench: Bench
    command: str
    date: str
    threads: int
    parts: dict[str, Findings] = field(default_factory=dict)
    part_ms: dict[str, float] = field(default_factory=dict)

    @classmethod
    def begin(cls, bench: Bench, command: str) -> Result:
        """A result without parts, dated now."""
        now = datetime.datetime.now(datetime.timezone.utc)
        return cls(bench, command, now.isoformat(timespec="seconds"), torch.get_num_threads())

    def faults(self) -> list[str]:
        """Everything that is wrong with lwkv, which no figure makes up for."""
        return [fault for findings in self.parts.values() for fault in findings.faults()]

    def to_json(self) -> dict[str, Any]:
        """Plain values only, the parts in the order in which they ran."""
        bench = self.bench
        return {
            "schema": SCHEMA,
            "date": self.date,
            "command": self.command,
            "platform": bench.platform.name,
            "device": device_name(bench.device),
            "kernels": choose_kernels(bench.platform).name,
            "threads": self.threads,
            "versions": _versions(),
            "shape": {**_fields(bench.shape), "dtype": str(bench.shape.dtype).removeprefix("torch.")},
            "prefix": bench.prefix,
            "suffixes": list(bench.suffixes),
            "repeats": bench.repeats,
            "faults": self.faults(),
            "part_ms": self.part_ms,
            "parts": {name: asdict(findings) for name, findings in self.parts.items()},
        }

    def write(self, path: str | PathLike[str]) -> None:
        """Write the JSON, whole or not at all."""
        path = Path(path)
        beside = path.with_suffix(".partial")
        beside.write_text(json.dumps(self.to_json(), indent=2) + "\n")
        beside.replace(path)

    def lines(self) -> Iterator[str]:
        """Tell it to a reader, line by line."""
        bench = self.bench
        absolute = bench.platform.device_type != "cpu"
        yield f"{device_name(bench.device)}, platform {bench.platform.name}; {bench.shape.name}; {self.date}"
        yield f"medians of {bench.repeats}; {self.command}"
        if not absolute:
            yield "The host is the device here: ratios and the host's own time mean something, GB/s do not."
        for name, findings in self.parts.items():
            yield ""
            yield f"{PARTS[name].title} ({name})"
            yield from (f"  {line}" for line in findings.lines(absolute))
        if faults := self.faults():
            yield ""
            yield "Faults"
            yield from (f"  - {fault}" for fault in faults)


def device_name(device: torch.device) -> str:
    """The name the driver gives the device; on the host, machine and number of cores."""
    ask = getattr(torch.get_device_module(device), "get_device_name", None)
    cores = len(os.sched_getaffinity(0))
    return f"{python_platform.machine()} host, {cores} cores" if ask is None else str(ask(device))


def _versions() -> dict[str, str]:
    found = {"lwkv": __version__, "python": python_platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _fields(item: Any) -> dict[str, Any]:
    return {each.name: getattr(item, each.name) for each in dataclasses.fields(item)}
