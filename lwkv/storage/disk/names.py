"""The names of the files in the folder of a disk tier."""

from __future__ import annotations

import os
import re
from enum import Enum

CHUNK_SUFFIX = ".kv"
BAD_SUFFIX = ".bad"
_KEY = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.[0-9a-f]{32}"
_OWN = re.compile(rf"{_KEY}\.(kv|bad|tmp-[0-9]+-[0-9a-f]{{8}})|\.lwkv-probe-[0-9]+-[0-9a-f]{{8}}")


class FileKind(Enum):
    """What a file in the folder is; any other is somebody else's and left alone."""

    CHUNK = "chunk"
    BAD = "set aside"
    DRAFT = "being written"
    PROBE = "left by a dead process that tried the folder"


def kind_of(name: str) -> FileKind | None:
    """What the file of this name is; None if it is not lwkv's."""
    match = _OWN.fullmatch(name)
    if match is None:
        return None
    return {"kv": FileKind.CHUNK, "bad": FileKind.BAD, None: FileKind.PROBE}.get(match[1], FileKind.DRAFT)


def is_key(text: str) -> bool:
    """Whether `text` can be the text of a chunk's key."""
    return re.fullmatch(_KEY, text) is not None


def draft_name(key: str) -> str:
    """A name, new each time, for the file of a chunk that is being written."""
    return f"{key}.tmp-{os.getpid()}-{os.urandom(4).hex()}"


def probe_name() -> str:
    """A name, new each time, for a file that is made to find out what the folder's file system can do."""
    return f".lwkv-probe-{os.getpid()}-{os.urandom(4).hex()}"
