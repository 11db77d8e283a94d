"""`lwkv inspect`: what is in the folder of a disk tier, whether it is whole, and what can go."""

from __future__ import annotations

import argparse
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO

from lwkv.errors import ConfigError
from lwkv.storage.disk.checksum import checksum
from lwkv.storage.disk.format import ALIGNMENT, BadFileError, Header, LayerEntry, header_size, unpack
from lwkv.storage.disk.io import bytes_taken, open_to_read
from lwkv.storage.disk.lock import is_owned, locked
from lwkv.storage.disk.names import CHUNK_SUFFIX, FileKind, kind_of

LOCK_TIMEOUT_S = 10.0
PIECE_BYTES = 1 << 24
LEFTOVER = "left by a dead writer"
OTHER_VERSION = "of another version"
NOT_READABLE = "not readable"


@dataclass(frozen=True)
class FileFound:
    """One file of the folder; `fault` says what is wrong with it. Bytes, and seconds since the epoch."""

    name: str
    kind: str
    num_bytes: int
    used_at: float
    page_format: str | None = None
    num_layers: int | None = None
    page_bytes: int | None = None
    fault: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="the folder of a disk tier, as local_disk has it"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read every byte and compare checksums; exit with 1 if one is wrong",
    )
    parser.add_argument(
        "--clean",
        action="store_true",
        help="remove damaged files, those renamed to .bad before, and leftovers of dead processes",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """List the files, and clean up. Returns 0, or 1 if a file with a fault is left. Raises ConfigError."""
    if not args.folder.is_dir():
        raise ConfigError(f"{str(args.folder)!r} is no folder: give the local_disk of a configuration")
    try:
        found = list(_look(args.folder, args.verify))
        removed = _clean(args.folder, found, args.verify) if args.clean else None
    except OSError as error:
        raise ConfigError(f"{str(args.folder)!r} cannot be used: {error}") from error
    if args.json:
        document = {"files": [asdict(file) for file in found], "removed": removed or []}
        print(json.dumps(document, indent=2))
    else:
        print("\n".join(_lines(found, removed, args.verify)))
    return 1 if any(file.fault and file.name not in (removed or ()) for file in found) else 0


def _look(folder: Path, verify: bool) -> Iterator[FileFound]:
    for path in sorted(folder.iterdir()):
        found = _look_at(path, verify)
        if found is not None:
            yield found


def _look_at(path: Path, verify: bool) -> FileFound | None:
    """What a file is; None for somebody else's, and for one that has gone."""
    kind = kind_of(path.name)
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    if kind is None:
        return None
    found = FileFound(path.name, kind.value, bytes_taken(status), status.st_mtime)
    if not stat.S_ISREG(status.st_mode):
        return replace(found, fault=f"it is {_in_words(status.st_mode)} and no ordinary file")
    found = _look_into(path, kind, found, verify)
    # Beside a writer a file may go, and another one come, while it is looked at.
    return found if _is_still(path, status) else _look_at(path, verify)


def _in_words(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder (--clean removes it if it is empty)"
    kinds = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def _is_still(path: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.lstat(), status)
    except FileNotFoundError:
        return False


def _look_into(path: Path, kind: FileKind, found: FileFound, verify: bool) -> FileFound:
    if kind is FileKind.PROBE or (kind is FileKind.DRAFT and not is_owned(str(path))):
        return replace(found, kind=LEFTOVER)
    if kind is not FileKind.CHUNK:
        return found
    try:
        form = _read(path, verify).form
    except FileNotFoundError:
        return found
    except PermissionError:
        return replace(found, kind=NOT_READABLE)
    except BadFileError as error:
        if error.reason == "version":
            return replace(found, kind=OTHER_VERSION)
        return replace(found, fault=str(error))
    except OSError as error:
        return replace(found, fault=f"it cannot be read: {error.strerror}")
    return replace(
        found, page_format=form.page_format, num_layers=form.num_layers, page_bytes=form.page_bytes
    )


def _read(path: Path, verify: bool) -> Header:
    """The header of a chunk's file. Raises BadFileError if anything is not as it says; OSError."""
    with os.fdopen(open_to_read(str(path), direct=False), "rb") as file:
        start = file.read(ALIGNMENT)
        header = unpack(start + file.read(header_size(start) - len(start)))
        if header.key + CHUNK_SUFFIX != path.name:
            raise BadFileError("foreign", f"it holds {header.key}")
        size = os.fstat(file.fileno()).st_size
        if size != header.form.file_bytes:
            end = "ends within" if size < header.form.file_bytes else "goes on after"
            raise BadFileError("truncated", f"it {end} its layers")
        for layer, entry in enumerate(header.layers if verify else ()):
            if _checksum(file, entry) != entry.checksum:
                raise BadFileError("corrupt", f"layer {layer} does not have the checksum it should")
    return header


def _checksum(file: BinaryIO, entry: LayerEntry) -> int:
    file.seek(entry.offset)
    left, sum_so_far = entry.length, 0
    while left and (data := file.read(min(left, PIECE_BYTES))):
        left, sum_so_far = left - len(data), checksum(data, sum_so_far)
    return sum_so_far


def _clean(folder: Path, found: list[FileFound], verify: bool) -> list[str]:
    removed = []
    with locked(str(folder), LOCK_TIMEOUT_S) as lock:
        for path in [folder / file.name for file in found if _is_useless(file)]:
            # Looked at anew, now that nobody adds files: another one may have the name by now.
            file = _look_at(path, verify)
            if file is None or not _is_useless(file) or not _remove(path):
                continue
            removed.append(file.name)
            if lock.used >= 0:
                lock.used -= file.num_bytes
    return removed


def _is_useless(file: FileFound) -> bool:
    return bool(file.fault) or file.kind in (FileKind.BAD.value, LEFTOVER)


def _remove(path: Path) -> bool:
    try:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()
    except OSError:
        return False
    return True


def _lines(found: list[FileFound], removed: list[str] | None, verified: bool) -> Iterator[str]:
    """A line for each file, and the sums; `removed` is None where nothing was to be."""
    for file in found:
        gone = " (removed)" if file.name in (removed or ()) else ""
        yield f"{file.num_bytes / 2**20:9.2f} MiB  {file.kind:21}  {file.name}  {_about(file)}{gone}".rstrip()
    whole = [file for file in found if file.kind == FileKind.CHUNK.value and not file.fault]
    checked = "every byte as its checksum says" if verified else "checksums not compared: --verify does"
    yield f"{len(whole)} chunks, {sum(file.num_bytes for file in whole) / 2**30:.2f} GiB; {checked}"
    faults = f"{sum(bool(file.fault) for file in found)} files with a fault"
    yield faults if removed is None else f"{faults}, {len(removed)} removed"


def _about(file: FileFound) -> str:
    if file.fault:
        return f"FAULT: {file.fault}"
    return f"{file.num_layers} layers of {file.page_bytes} B, {file.page_format}" if file.num_layers else ""
