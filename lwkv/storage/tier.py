"""What a lower tier (disk, remote) must offer. The host tier is special: its pages are the pool's own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Protocol, runtime_checkable

import torch

from lwkv.config.settings import Config
from lwkv.keys import ChunkKey, LayerKey
from lwkv.telemetry.counters import Counters

HOST = "host"
"""The name of host memory among the tiers."""


class Status(Enum):
    """How one key of a call ended. Only pages with OK may be read."""

    OK = "ok"
    MISS = "miss"
    ERROR = "error"


class Missing(IntEnum):
    """Why a chunk has no page in a layer. It stands where the page's number would, and is below 0."""

    MISS = -1
    """The tier that had the chunk does not have this layer of it."""
    ERROR = -2
    """Its tier failed, or is skipped because it did."""
    NO_MEMORY = -3
    """No page of host memory was free, and none could be freed."""
    LATE = -4
    """It did not arrive in time."""


class Tier(Protocol):
    """A place for pages below host memory.

    Calls block, run on threads of the tier's guard, several at once, and should return within `deadline_s`
    seconds; whoever waits has its own clock. Raising counts as ERROR for every key of the call: raise where
    the tier itself fails, so that it is skipped for a while. A chunk is present when its layer 0 is: the
    guard puts layer 0 last, in a call of its own, and only where every other layer was OK; a tier removes it
    first. What a tier cannot verify (another key, other bytes than were put) is a MISS.

    At the interpreter's exit the calls under way have five seconds to return, all tiers together: a thread
    that is inside torch when the interpreter exits can abort the process.
    """

    name: str

    def contains(self, keys: Sequence[ChunkKey], deadline_s: float) -> list[bool]:
        """Whether each chunk is present, without reading payloads; whoever else put it."""

    def get(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor], deadline_s: float) -> list[Status]:
        """Fill each page, uint8 (page_bytes,), with the layer of its key; one status a key.

        Keys are of one layer or several, of any chunks. Nothing is written to a page once the call returned.
        """

    def put(self, keys: Sequence[LayerKey], pages: Sequence[torch.Tensor], deadline_s: float) -> list[Status]:
        """Keep a copy of each page, uint8 (page_bytes,), which does not change before the call returns.

        Keys are of one layer or several, of any chunks. What is there already may be left as it is: the same
        key has the same bytes. MISS where nothing is wrong and there is no room that others need less.
        """

    def close(self) -> None:
        """Give everything back; calls after that raise or return no OK. No other call is under way."""


@runtime_checkable
class Ordered(Protocol):
    """What a tier may offer beyond Tier that evicts chunks itself: a prompt is of use only from its start."""

    def follow(self, prompt: Sequence[ChunkKey], deadline_s: float) -> None:
        """Note that a prompt is used that has these chunks in a row, whether they are here or not.

        Where the first of them is not the first of the prompt, it was named as the last of a call before. The
        last one may be about to be put: nothing before it is to go for that. May block and raise as the other
        calls.
        """


_CALLS: Mapping[str, Sequence[str]] = {
    "contains": ("keys", "deadline_s"),
    "get": ("keys", "pages", "deadline_s"),
    "put": ("keys", "pages", "deadline_s"),
    "close": (),
}


def what_it_lacks(tier: object) -> list[str]:
    """What a tier, maybe somebody else's, lacks of a Tier: it would start without, and fail in every call."""
    name = getattr(tier, "name", None)
    calls = [f"{call}({', '.join(of)})" for call, of in _CALLS.items() if not _takes(tier, call, of)]
    return [*([] if isinstance(name, str) and name else ["a name"]), *calls]


def _takes(tier: object, name: str, arguments: Sequence[str]) -> bool:
    method = getattr(tier, name, None)
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError:
        return False
    except ValueError:
        return True  # a builtin, which does not say what it takes
    return True


WARNING = "warning"


@runtime_checkable
class Gauged(Protocol):
    """What a tier may offer beyond Tier."""

    def gauges(self) -> dict[str, int]:
        """What there is now, by name, for metrics. As other calls it may block and raise; it has no deadline.

        While it does, metrics have what it returned last.
        """


@runtime_checkable
class Lingering(Protocol):
    """Declared by a tier whose transfers outlive its calls: `get` may write to pages that were not OK for
    `grace_s` seconds after it returned or raised. They are nobody else's until then, or until `close`."""

    grace_s: float


@dataclass(frozen=True)
class TierSetup:
    """What a tier learns of the engine that it serves.

    `page_format` describes how the bytes of a page are laid out, for people and other tools; the namespace of
    the keys covers all of it. Pages are parts of the pool's slabs: `page.untyped_storage()` is the slab,
    which lives as long as the engine. Why something failed is counted in `counters`, as "<tier>_<reason>".
    Chunks have `num_layers` layers, but those whose keys have a namespace that is in `layers`.
    """

    config: Config
    num_layers: int
    page_bytes: int
    page_format: str
    counters: Counters
    layers: Mapping[str, int] = field(default_factory=dict)


class TierModule(Protocol):
    """What the module of a kind of tier has: `lwkv.storage.registry` names the modules by URL scheme."""

    def open_tier(self, url: str, setup: TierSetup) -> Tier:
        """Open the tier at `url`.

        A server that does not answer is no error: calls will fail until it does.

        Raises:
            ConfigError: what the user has to change: the URL, a package that is missing, a folder that cannot
                be written to. The text has no password.
        """

    def examine(self, url: str, config: Config) -> Mapping[str, str]:
        """Tell `lwkv doctor` how the tier at `url` is: what, and how it is. What WARNING has is a warning.
        Raises what does not work: ConfigError, OSError or RuntimeError."""
