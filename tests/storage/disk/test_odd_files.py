"""Files of any kind under any of lwkv's names: the tier works beside them, and inspect removes them."""

from __future__ import annotations

import json
import os
import socket
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from storage.disk_rig import FORM, opened
from storage.rig import NUM_LAYERS, key, keys
from storage.tier_calls import layer_keys, load, store

from lwkv.cli.main import main
from lwkv.storage import Status
from lwkv.storage.disk.format import pack

TEXT = key(1).to_string()
NAMES = [f"{TEXT}.kv", f"{TEXT}.bad", f"{TEXT}.tmp-1-00000000", ".lwkv-probe-1-00000000"]
TB = 10**12


def dangling_link(path: Path) -> None:
    path.symlink_to("/not/there")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def link_to_a_folder(path: Path) -> None:
    path.symlink_to("/")


def a_socket(path: Path) -> None:
    # By a short name: that of the test's folder may be too long for a socket.
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)


def header_with(text: bytes) -> Callable[[Path], None]:
    """A file of the right size whose header has the right checksum, and this text."""

    def make(path: Path) -> None:
        data = bytearray(pack(FORM.header(TEXT, [0] * NUM_LAYERS), FORM.header_bytes))
        data[16:20], data[24:28] = len(text).to_bytes(4, "little"), bytes(4)
        data[28 : 28 + len(text)] = text
        data[24:28] = zlib.crc32(data).to_bytes(4, "little")
        path.write_bytes(bytes(data).ljust(FORM.file_bytes, b"x"))

    return make


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(TB)


KINDS: dict[str, Callable[[Path], object]] = {
    "a dangling link": dangling_link,
    "a link to itself": link_to_itself,
    "a link to a folder": link_to_a_folder,
    "a socket": a_socket,
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "nothing": Path.touch,
    "an object": header_with(b"{}"),
    "a list": header_with(b"[]"),
    "no text": header_with(b"\xff\xff"),
    "a hole of 1 TB": sparse,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_tier_starts_and_works_beside_it(tmp_path: Path, kind: str, name: str) -> None:
    with opened(tmp_path, room=4) as rig:
        store(rig.open(), *keys(2, 3))
        KINDS[kind](tmp_path / name)
        tier = rig.open()
        assert all(rig.is_whole(tier, chunk) for chunk in keys(2, 3)), "no older chunk goes for it"
        for layer in (1, 1, 2):
            assert load(tier, layer_keys(key(1), [layer])) == [Status.MISS]
        assert tier.contains(keys(1, 2, 3), 1) == [False, True, True]
        store(tier, key(1))
        assert rig.is_whole(tier, key(1))
        bad = {name: count for name, count in rig.counters.totals().items() if name != "disk_leftovers"}
        assert sum(bad.values()) == name.endswith(".kv"), "it is looked into once"
        rig.used()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_inspect_tells_of_it_in_one_line_and_removes_it(
    tmp_path: Path, kind: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(tmp_path) as rig:
        store(rig.open(), key(2))
    KINDS[kind](tmp_path / name)
    main(["inspect", "--verify", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert [name in line for line in lines].count(True) == 1
    assert main(["inspect", "--json", "--clean", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["removed"] == [name]
    assert not os.path.lexists(tmp_path / name)
    with opened(tmp_path) as rig:
        assert rig.is_whole(rig.open(), key(2))
        assert rig.used() == FORM.file_bytes


def test_a_folder_that_is_not_empty_stays_and_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / NAMES[2] / "mine").mkdir(parents=True)
    assert main(["inspect", "--clean", str(tmp_path)]) == 1
    assert "FAULT: it is a folder (--clean removes it if it is empty)" in capsys.readouterr().out
    assert (tmp_path / NAMES[2] / "mine").exists()


def test_what_a_process_left_that_was_killed_while_it_tried_the_folder_goes_with_the_next_start(
    tmp_path: Path,
) -> None:
    for number in range(3):
        (tmp_path / f".lwkv-probe-{number}-0123abcd").write_bytes(bytes(4096))
    with opened(tmp_path) as rig:
        rig.open()
        assert rig.counters.totals() == {"disk_leftovers": 3}
        assert os.listdir(tmp_path) == [".lwkv-lock"]
        assert rig.used() == 0


def test_trying_the_folder_leaves_no_name_behind_even_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    pwrite = os.pwrite

    def note(*arguments: object) -> int:
        seen.append(os.listdir(tmp_path))
        return int(pwrite(*arguments))  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwrite", note)
    with opened(tmp_path) as rig:
        rig.open()
    assert seen[0] == []
