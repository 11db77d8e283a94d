"""The names of the files in the folder of a disk tier."""

from __future__ import annotations

import os
import re
from enum import Enum

CHUNK_SUFFIX = ".kv"
BAD_SUFFIX = ".bad"
_OWN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.[0-9a-f]{32}\.(kv|bad|tmp-[0-9]+-[0-9a-f]{8})")


class Kind(Enum):
    """What a file in the folder is; any other is somebody else's and left alone."""

    CHUNK = "chunk"
    BAD = "set aside"
    DRAFT = "being written"


def kind_of(name: str) -> Kind | None:
    """What the file of this name is; None if it is not lwkv's."""
    match = _OWN.fullmatch(name)
    if match is None:
        return None
    return {"kv": Kind.CHUNK, "bad": Kind.BAD}.get(match[1], Kind.DRAFT)


def draft_name(key: str) -> str:
    """A name, new each time, for the file of a chunk that is being written."""
    return f"{key}.tmp-{os.getpid()}-{os.urandom(4).hex()}"
