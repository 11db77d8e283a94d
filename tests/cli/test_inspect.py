from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from storage.disk_rig import FORM, in_another_form, opened
from storage.rig import NUM_LAYERS, PAGE_BYTES, key, keys
from storage.tier_calls import put, store

from lwkv.cli.main import main
from lwkv.storage.disk.io import open_to_read
from lwkv.storage.disk.lock import locked


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three chunks, one with a wrong byte, something set aside, a leftover and a file of the user's."""
    with opened(tmp_path) as rig:
        store(rig.open(), *keys(1, 2, 3))
        with rig.path(key(2)).open("r+b") as file:
            file.seek(FORM.offset(1))
            file.write(b"x")
    (tmp_path / f"{key(4).to_string()}.bad").write_bytes(bytes(100))
    (tmp_path / f"{key(5).to_string()}.tmp-1-00000000").write_bytes(bytes(200))
    (tmp_path / "notes.txt").write_text("mine")
    return tmp_path


def inspect(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    code = main(["inspect", "--json", *map(str, arguments)])
    return code, json.loads(capsys.readouterr().out)


def test_files_are_listed_with_what_they_say_of_themselves(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = inspect(capsys, folder)
    assert code == 0
    assert [(file["kind"], file["num_bytes"], file["fault"]) for file in found["files"]] == [
        ("chunk", FORM.file_bytes, None),
        ("chunk", FORM.file_bytes, None),
        ("chunk", FORM.file_bytes, None),
        ("set aside", 100, None),
        ("left by a dead writer", 200, None),
    ]
    first = found["files"][0]
    assert first["name"] == f"{key(1).to_string()}.kv"
    assert (first["num_layers"], first["page_bytes"], first["page_format"]) == (
        NUM_LAYERS,
        PAGE_BYTES,
        "canonical",
    )


def test_verify_reads_everything_and_exits_with_1_for_a_wrong_byte(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = inspect(capsys, folder, "--verify")
    assert code == 1
    faults = {file["name"]: file["fault"] for file in found["files"] if file["fault"]}
    assert faults == {f"{key(2).to_string()}.kv": "layer 1 does not have the checksum it should"}


def test_clean_removes_what_is_of_no_use_and_nothing_else(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(folder) as rig:
        writer = rig.open()
        put(writer, key(6), [1])
        (folder / f"{key(5).to_string()}.tmp-1-00000000").write_bytes(bytes(200))
        code, found = inspect(capsys, folder, "--verify", "--clean")
        assert code == 0
        assert len(found["removed"]) == 3
        left = sorted(path.suffix for path in folder.iterdir() if not path.name.startswith("."))
        assert [suffix[:4] for suffix in left] == [".kv", ".kv", ".tmp", ".txt"]
        assert inspect(capsys, folder, "--verify")[0] == 0
    with opened(folder) as rig:
        rig.open()
        (folder / "notes.txt").unlink()
        assert rig.used() == 2 * FORM.file_bytes


def test_a_chunk_cut_off_or_foreign_is_a_fault_without_reading_all_of_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / f"{key(1).to_string()}.kv").write_bytes(b"\x80\x04 not lwkv's")
    with (folder / f"{key(3).to_string()}.kv").open("r+b") as file:
        file.truncate(FORM.file_bytes - 4096)
    (folder / f"{key(7).to_string()}.kv").symlink_to("/etc/passwd")
    (folder / f"{key(2).to_string()}.kv").rename(folder / f"{key(8).to_string()}.kv")
    code, found = inspect(capsys, folder)
    assert code == 1
    assert [file["fault"] for file in found["files"] if file["fault"]] == [
        "it does not begin as a file of lwkv does",
        "it ends within its layers",
        "it is a link and no ordinary file",
        f"it holds {key(2).to_string()}",
    ]


def test_what_another_version_wrote_is_reported_and_left_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = folder / f"{key(9).to_string()}.kv"
    theirs.write_bytes(in_another_form(key(9), "version"))
    _, found = inspect(capsys, folder, "--clean", "--verify")
    told = [(file["kind"], file["fault"]) for file in found["files"] if file["name"] == theirs.name]
    assert told == [("of another version", None)]
    assert theirs.exists()


def test_the_text_tells_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder), "--verify"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert lines[0].endswith(f"{key(1).to_string()}.kv  3 layers of 5 B, canonical")
    assert lines[1].endswith("FAULT: layer 1 does not have the checksum it should")
    assert lines[-2:] == [
        "2 chunks, 0.00 GiB; every byte as its checksum says",
        "1 files with a fault",
    ]


def test_a_folder_that_is_not_there_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "/not/there"]) == 2
    assert capsys.readouterr().err == (
        "lwkv: '/not/there' is no folder: give the local_disk of a configuration\n"
    )


def test_a_file_that_may_not_be_read_is_reported_and_left(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file, refused = open_to_read, f"{key(3).to_string()}.kv"

    def refuse(path: str, direct: bool) -> int:
        if path.endswith(refused):
            raise PermissionError(13, "Permission denied", path)
        return open_file(path, direct)

    monkeypatch.setattr("lwkv.cli.inspect.open_to_read", refuse)
    code, found = inspect(capsys, folder, "--clean")
    assert code == 0
    assert [file["kind"] for file in found["files"] if file["name"] == refused] == ["not readable"]
    assert (folder / refused).exists()


def evict(path: str, whole: bytes) -> None:
    os.unlink(path)


def evict_and_store_anew(path: str, whole: bytes) -> None:
    other = Path(f"{path}.new")
    other.write_bytes(whole)
    other.rename(path)


@pytest.mark.parametrize("meanwhile", [evict, evict_and_store_anew])
@pytest.mark.parametrize("is_open", [False, True])
def test_a_file_that_a_writer_evicts_while_it_is_looked_at_is_no_fault(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    meanwhile: Callable[[str, bytes], None],
    is_open: bool,
) -> None:
    moving, opened_files = folder / f"{key(1).to_string()}.kv", []
    whole = moving.read_bytes()

    def open_beside_a_writer(path: str, direct: bool) -> int:
        is_first = path == str(moving) and path not in opened_files
        opened_files.append(path)
        if is_first and not is_open:
            meanwhile(path, whole)
        file = open_to_read(path, direct)
        if is_first and is_open:
            os.truncate(path, 5000)
            meanwhile(path, whole)
        return file

    monkeypatch.setattr("lwkv.cli.inspect.open_to_read", open_beside_a_writer)
    _, found = inspect(capsys, folder, "--verify")
    faults = {file["name"]: file["fault"] for file in found["files"]}
    assert faults.get(moving.name) is None
    assert (moving.name in faults) == (meanwhile is evict_and_store_anew)


def test_clean_looks_again_before_it_removes(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad file may have been set aside and written anew, and a draft may have got its owner, meanwhile."""
    spoilt = folder / f"{key(2).to_string()}.kv"
    with opened(folder) as rig:
        tier = rig.open()

        def lock_after_a_writer(*arguments: Any) -> Any:
            spoilt.unlink()
            store(tier, key(2))
            return locked(*arguments)

        monkeypatch.setattr("lwkv.cli.inspect.locked", lock_after_a_writer)
        _, found = inspect(capsys, folder, "--verify", "--clean")
        assert spoilt.name not in found["removed"]
        assert rig.is_whole(tier, key(2))
