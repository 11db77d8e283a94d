"""What owner and client say of themselves before all else, and whether they can work together."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import TypeVar

from lwkv.keys import FORMAT_VERSION
from lwkv.shared_host.numa import UNKNOWN
from lwkv.shared_host.protocol import VERSION, ProtocolError

T = TypeVar("T", "Hello", "Welcome")


@dataclass(frozen=True)
class Hello:
    """A client.

    Attributes:
        page_stride: bytes from a page to the next; 0 for one that only asks what is there.
        version, page_format: of the messages, and of keys and pages.
        node: the NUMA node whose memory it is to have first; below 0 for none.
        name: by which others promise it chunks, the same at every owner; empty for a client without pages.
    """

    page_stride: int
    version: int = VERSION
    page_format: int = FORMAT_VERSION
    node: int = UNKNOWN
    name: str = ""


@dataclass(frozen=True)
class Welcome:
    """An owner.

    Attributes:
        owner: its name, another one each time it starts.
        num_bytes: of the memory whose descriptor comes with this; 0 for a client that only asks.
        num_pages: of the client's size that can be in it, `span` in each slab and fewer in the last.
        slab_bytes: from a slab to the next. The owner says which of the pages are the client's.
        client: a number that no other client of this owner has, or had.
    """

    owner: str
    num_bytes: int = 0
    num_pages: int = 0
    span: int = 1
    slab_bytes: int = 0
    client: int = 0


def write(greeting: Hello | Welcome) -> bytes:
    return json.dumps(asdict(greeting)).encode()


def read(kind: type[T], part: bytes) -> T:
    """Raises ProtocolError; fields that are not known are left out, so that versions can be compared."""
    try:
        values = json.loads(part)
        known = {field.name: values[field.name] for field in fields(kind) if field.name in values}
        return kind(**known)
    except (ValueError, TypeError, RecursionError) as error:  # the last of what is nested too deep
        raise ProtocolError(f"got {part[:80]!r} as a {kind.__name__}") from error


def why_not(hello: Hello) -> str | None:
    """Why an owner of this version cannot serve a client; None if it can."""
    mine = (VERSION, FORMAT_VERSION)
    theirs = (hello.version, hello.page_format)
    if theirs != mine:
        return (
            f"the owner has version {VERSION} of the messages and {FORMAT_VERSION} of the pages, this client "
            f"{hello.version} and {hello.page_format}: run both from the same version of lwkv"
        )
    stride = hello.page_stride
    if type(stride) is not int or stride < 0 or stride % 4096:
        return f"got page_stride={stride!r}; allowed: 0, or a multiple of 4096"
    if type(hello.name) is not str:
        return f"got name={hello.name!r}; allowed: text"
    return None
