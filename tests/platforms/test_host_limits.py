"""Limits of memory out of the files that Linux tells them by, version 1 and 2 of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from lwkv.platforms.host_limits import MemoryLimit, read_limits, read_lock_limit

MIB = 1 << 20
MEMINFO = "MemTotal:       24000 kB\nMemFree:         100 kB\nMemAvailable:   20000 kB\nBuffers:  5 kB\n"
MACHINE = MemoryLimit("the machine's memory", 24000 << 10, 20000 << 10, False)
V1_MOUNT = "34 31 0:32 {within} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V2_MOUNT = "30 23 0:26 {within} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
OTHERS = "31 23 0:1 / /proc rw - proc proc rw\n35 31 0:2 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"


def write(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return root


def machine(root: Path, mounts: str, groups: str) -> Path:
    return write(
        root,
        {"proc/meminfo": MEMINFO, "proc/self/mountinfo": OTHERS + mounts, "proc/self/cgroup": groups},
    )


def test_without_control_groups_there_is_the_machine(tmp_path: Path) -> None:
    assert read_limits(machine(tmp_path, "", "0::/\n")) == [MACHINE]


def test_a_system_that_tells_nothing_has_no_limits(tmp_path: Path) -> None:
    assert read_limits(tmp_path) == []


@pytest.mark.parametrize(
    ("within", "group", "folder"),
    [
        ("/", "/", "sys/fs/cgroup"),
        ("/", "/kubepods/pod1", "sys/fs/cgroup/kubepods/pod1"),
        ("/docker/abc", "/docker/abc", "sys/fs/cgroup"),
        ("/docker/abc", "/docker/abc/in", "sys/fs/cgroup/in"),
        ("/", "/../../elsewhere", "sys/fs/cgroup"),
        ("/", "/gone", "sys/fs/cgroup"),
    ],
)
def test_the_limit_of_version_2_is_that_of_the_own_group(
    tmp_path: Path, within: str, group: str, folder: str
) -> None:
    root = machine(tmp_path, V2_MOUNT.format(within=within), f"0::{group}\n")
    write(
        root / folder,
        {
            "memory.max": f"{10 * MIB}\n",
            "memory.current": f"{6 * MIB}\n",
            "memory.stat": f"anon {3 * MIB}\ninactive_file {2 * MIB}\nactive_file {MIB}\nslab 5\n",
        },
    )
    container = MemoryLimit(f"the container's memory limit (/{folder}/memory.max)", 10 * MIB, 7 * MIB, True)
    assert read_limits(root) == [container, MACHINE]


def test_the_limit_of_version_1_is_that_of_the_own_group(tmp_path: Path) -> None:
    groups = "9:name=systemd:/\n4:hugetlb,memory:/jobs/one\n1:cpu:/\n0::/\n"
    root = machine(tmp_path, V1_MOUNT.format(within="/") + V2_MOUNT.format(within="/"), groups)
    folder = root / "sys/fs/cgroup/memory/jobs/one"
    write(
        folder,
        {
            "memory.limit_in_bytes": 8 * MIB,
            "memory.usage_in_bytes": 5 * MIB,
            "memory.stat": f"inactive_file 1\ntotal_inactive_file {MIB}\ntotal_active_file 0\n",
        },
    )
    [container, other] = read_limits(root)
    assert (container.total, container.free, container.is_container) == (8 * MIB, 4 * MIB, True)
    assert container.what.endswith("(/sys/fs/cgroup/memory/jobs/one/memory.limit_in_bytes)")
    assert other == MACHINE


def test_of_groups_inside_each_other_all_limits_hold(tmp_path: Path) -> None:
    root = machine(tmp_path, V2_MOUNT.format(within="/"), "0::/a/b\n")
    write(
        root / "sys/fs/cgroup/a",
        {"memory.max": 3 * MIB, "memory.current": MIB, "b/memory.max": 9 * MIB, "b/memory.current": 0},
    )
    assert [limit.total for limit in read_limits(root)] == [3 * MIB, 9 * MIB, MACHINE.total]


@pytest.mark.parametrize("unlimited", ["max", "9223372036854771712", "", "-1"])
def test_a_group_without_limit_has_none(tmp_path: Path, unlimited: str) -> None:
    root = machine(tmp_path, V2_MOUNT.format(within="/"), "0::/\n")
    write(root / "sys/fs/cgroup", {"memory.max": unlimited, "memory.current": 5})
    assert read_limits(root) == [MACHINE]


def test_what_is_used_beyond_the_limit_leaves_nothing(tmp_path: Path) -> None:
    root = machine(tmp_path, V2_MOUNT.format(within="/"), "0::/\n")
    write(root / "sys/fs/cgroup", {"memory.max": MIB, "memory.current": 2 * MIB})
    assert read_limits(root)[0].free == 0


def test_a_mount_with_a_space_in_its_name_is_found(tmp_path: Path) -> None:
    mount = r"30 23 0:26 / /my\040groups rw - cgroup2 cgroup2 rw" + "\n"
    root = machine(tmp_path, mount, "0::/\n")
    write(root / "my groups", {"memory.max": MIB, "memory.current": 0})
    assert read_limits(root)[0].total == MIB


def test_this_machine_has_memory() -> None:
    limits = read_limits()
    assert all(0 <= limit.free <= limit.total for limit in limits)
    assert limits == sorted(limits, key=lambda limit: limit.total)


def test_what_may_be_locked_is_a_number_of_bytes_or_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    for told, wanted in (
        ((65536, 65536), 65536),
        ((resource.RLIM_INFINITY,) * 2, None),
        ((1 << 62, 0), None),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda _, told=told: told)
        assert read_lock_limit() == wanted
