"""How much host memory this process may have: the machine's, and what its container leaves of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

try:
    import resource
except ImportError:  # not there on Windows
    resource = None  # type: ignore[assignment]

_UNLIMITED = 1 << 60
ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One limit, in bytes. `free` counts what the system gives back for the asking, such as the page cache.

    `is_container` tells a limit of a control group (version 1 or 2) from the memory of the machine.
    """

    what: str
    total: int
    free: int
    is_container: bool


def read_limits(root: Path = ROOT) -> list[MemoryLimit]:
    """Every limit that holds for this process, the tightest first; empty where the system tells none.

    Args:
        root: of the file system that `proc` and the control groups are read from.
    """
    return sorted([*_machine(root), *_containers(root)], key=lambda limit: limit.total)


def read_lock_limit() -> int | None:
    """Bytes that the system lets this process lock (RLIMIT_MEMLOCK); None for as much as it likes.

    A GPU's driver that locks memory by itself mostly does not count against it; that of a network card does.
    """
    if resource is None:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY or soft >= _UNLIMITED else soft


def _machine(root: Path) -> Iterator[MemoryLimit]:
    rows = dict(re.findall(r"^(\w+):\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE))
    if "MemTotal" in rows:
        total = int(rows["MemTotal"]) << 10
        free = int(rows.get("MemAvailable") or rows.get("MemFree") or 0) << 10
        yield MemoryLimit("the machine's memory", total, free, False)
    elif root == ROOT and "SC_AVPHYS_PAGES" in os.sysconf_names:
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
        yield MemoryLimit("the machine's memory", total, free, False)


def _containers(root: Path) -> Iterator[MemoryLimit]:
    own = _own_groups(_text(root / "proc/self/cgroup"))
    for line in _text(root / "proc/self/mountinfo").splitlines():
        mount, _, source = line.partition(" - ")
        kind, options = source.split()[0] if source else "", source.split()[-1:]
        names = ("memory.max", "memory.current", "") if kind == "cgroup2" else None
        if kind == "cgroup" and "memory" in ",".join(options).split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        group = own.get("" if kind == "cgroup2" else "memory")
        if names is not None and group is not None:
            within, top = (_unescaped(part) for part in mount.split()[3:5])
            for folder in _groups_of(root / top.lstrip("/"), within, group):
                yield from _group_limit(root, folder, *names)


def _own_groups(text: str) -> Mapping[str, str]:
    """The path of this process's group, by each controller of version 1, and by "" of version 2."""
    groups: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        groups |= dict.fromkeys(controllers.split(","), path)
    return groups


def _groups_of(top: Path, within: str, group: str) -> Iterator[Path]:
    """The folder of a group and of all that it is in: the limits of all of them hold.

    Only the part `within` of all groups is mounted at `top`; from inside a container it is the container's.
    """
    path = group.removeprefix(within.rstrip("/")).strip("/") if group.startswith(within) else ""
    folder = top / path if ".." not in path.split("/") and (top / path).is_dir() else top
    yield folder
    while folder != top:
        folder = folder.parent
        yield folder


def _group_limit(root: Path, folder: Path, limit: str, usage: str, prefix: str) -> Iterator[MemoryLimit]:
    total, used = _number(folder / limit), _number(folder / usage) or 0
    if total is None or total >= _UNLIMITED:
        return
    rows = dict(re.findall(r"^(\w+) (\d+)$", _text(folder / "memory.stat"), re.MULTILINE))
    cached = sum(int(rows.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
    what = f"the container's memory limit (/{(folder / limit).relative_to(root)})"
    yield MemoryLimit(what, total, max(0, total - max(0, used - cached)), True)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text()
    return ""


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)
