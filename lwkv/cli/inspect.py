"""`lwkv inspect`: what is in the folder of a disk tier, whether it is whole, and what can go."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from lwkv.errors import ConfigError
from lwkv.storage.disk.checksum import checksum
from lwkv.storage.disk.format import ALIGNMENT, BadFileError, Header, header_size, unpack
from lwkv.storage.disk.lock import is_owned, locked
from lwkv.storage.disk.names import CHUNK_SUFFIX, Kind, kind_of

LOCK_TIMEOUT_S = 10.0
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
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of a disk tier")
    parser.add_argument("--verify", action="store_true", help="read everything and compare checksums")
    parser.add_argument(
        "--clean",
        action="store_true",
        help="remove what is of no use: files set aside, leftovers of dead writers, files with a fault",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """List the files, and clean up. Returns 0, or 1 if a file with a fault is left. Raises ConfigError."""
    if not args.folder.is_dir():
        raise ConfigError(f"{str(args.folder)!r} is no folder: give the local_disk of a configuration")
    try:
        found = list(_look(args.folder, args.verify))
        removed = _clean(args.folder, found) if args.clean else []
    except OSError as error:
        raise ConfigError(f"{str(args.folder)!r} cannot be used: {error}") from error
    if args.json:
        document = {"files": [asdict(file) for file in found], "removed": removed}
        print(json.dumps(document, indent=2))
    else:
        print("\n".join(_lines(found, removed, args.verify)))
    return 1 if any(file.fault and file.name not in removed for file in found) else 0


def _look(folder: Path, verify: bool) -> Iterator[FileFound]:
    for path in sorted(folder.iterdir()):
        kind = kind_of(path.name)
        if kind is None:
            continue
        try:
            stat = path.lstat()
            told = _kind_in_words(path, kind)
            header = _read(path, verify) if kind is Kind.CHUNK else None
        except FileNotFoundError:
            continue  # removed meanwhile
        except PermissionError:
            yield FileFound(path.name, NOT_READABLE, stat.st_size, stat.st_mtime)
        except BadFileError as error:
            if error.reason == "version":
                yield FileFound(path.name, OTHER_VERSION, stat.st_size, stat.st_mtime)
            else:
                yield FileFound(path.name, told, stat.st_size, stat.st_mtime, fault=str(error))
        else:
            details = (header.page_format, len(header.layers), header.layers[0].length) if header else ()
            yield FileFound(path.name, told, stat.st_size, stat.st_mtime, *details)


def _kind_in_words(path: Path, kind: Kind) -> str:
    return LEFTOVER if kind is Kind.DRAFT and not is_owned(str(path)) else kind.value


def _read(path: Path, verify: bool) -> Header:
    """The header of a chunk's file. Raises BadFileError if anything is not as it says."""
    if path.is_symlink() or not path.is_file():
        raise BadFileError("foreign", "it is no ordinary file")
    with path.open("rb") as file:
        start = file.read(ALIGNMENT)
        header = unpack(start + file.read(header_size(start) - len(start)))
        if header.key + CHUNK_SUFFIX != path.name:
            raise BadFileError("foreign", f"it holds {header.key}")
        size = os.fstat(file.fileno()).st_size
        if any(entry.offset + entry.length > size for entry in header.layers):
            raise BadFileError("truncated", "it ends within its layers")
        for layer, entry in enumerate(header.layers if verify else ()):
            file.seek(entry.offset)
            if checksum(file.read(entry.length)) != entry.checksum:
                raise BadFileError("corrupt", f"layer {layer} does not have the checksum it should")
    return header


def _clean(folder: Path, found: list[FileFound]) -> list[str]:
    useless = [file for file in found if file.fault or file.kind in (Kind.BAD.value, LEFTOVER)]
    removed = []
    with locked(str(folder), LOCK_TIMEOUT_S) as lock:
        for file in useless:
            try:
                (folder / file.name).unlink()
            except (FileNotFoundError, IsADirectoryError, PermissionError):
                continue
            removed.append(file.name)
            if lock.used >= 0:
                lock.used -= file.num_bytes
    return removed


def _lines(found: list[FileFound], removed: list[str], verified: bool) -> Iterator[str]:
    for file in found:
        gone = " (removed)" if file.name in removed else ""
        yield f"{file.num_bytes / 2**20:9.2f} MiB  {file.kind:21}  {file.name}  {_about(file)}{gone}".rstrip()
    whole = [file for file in found if file.kind == Kind.CHUNK.value and not file.fault]
    checked = "every byte as its checksum says" if verified else "checksums not compared: --verify does"
    yield f"{len(whole)} chunks, {sum(file.num_bytes for file in whole) / 2**30:.2f} GiB; {checked}"
    yield f"{sum(bool(file.fault) for file in found)} files with a fault, {len(removed)} removed"


def _about(file: FileFound) -> str:
    if file.fault:
        return f"FAULT: {file.fault}"
    return f"{file.num_layers} layers of {file.page_bytes} B, {file.page_format}" if file.num_layers else ""
