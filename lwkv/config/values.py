"""The kinds of values that settings have, each with the words that tell a user what is allowed.

Values are taken as they are, and only flags read words: neither True nor "256" is a number, 2 is no flag.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from os import PathLike, fspath
from os.path import expanduser, isabs
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from lwkv.config.addresses import WrongAddressError, check_hosts

FLAG_WORDS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
CHECK_LAYERS = (1,)
RECOMPUTE_RATIOS = (0.15,)

_OFF = ("null", "none", "false", "off", "no")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True)
class Allowed:
    """What a setting takes: `kind` for the documentation, `values` in words for an error."""

    kind: str
    values: str


def read_flag(value: object) -> bool:
    """Read a bool, 0, 1 or one of FLAG_WORDS in any case. Raises ValueError for all else, blank included."""
    word = str(value).strip().lower() if isinstance(value, (bool, int, str)) else ""
    if word not in FLAG_WORDS:
        raise ValueError(f"no flag; the words are {', '.join(FLAG_WORDS)}")
    return FLAG_WORDS[word]


def _as_tuple(value: object) -> object:
    if isinstance(value, (int, float)):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _ascending(layers: tuple[int, ...]) -> tuple[int, ...]:
    if any(a >= b for a, b in pairwise(layers)):
        raise ValueError("not ascending")
    return layers


def _is_off(value: object) -> bool:
    """Whether a value is one of the words for nothing, in whatever way YAML and Python write them."""
    return value is None or value is False or (isinstance(value, str) and value.strip().lower() in _OFF)


def _disk_path(value: object) -> object:
    if _is_off(value):
        return None
    if isinstance(value, PathLike):
        value = fspath(value)
    if not isinstance(value, str):
        return value
    path = expanduser(value.strip().removeprefix("file://"))
    if not path or "\0" in path:
        raise WrongAddressError("it names no path")
    if "://" in path:
        raise WrongAddressError("it is a URL and no path; a server is given as remote_url")
    return path


def _socket_path(value: object) -> object:
    path = _disk_path(value)
    # Each process would look for it in its own working directory, and the owner in another one.
    if isinstance(path, str) and not isabs(path):
        raise WrongAddressError("it is relative, and processes have working directories of their own")
    return path


def _remote_url(value: object) -> object:
    if _is_off(value):
        return None
    if not isinstance(value, str):
        raise WrongAddressError("it is no text")
    url = value.strip()
    if any(character.isspace() for character in url):
        raise WrongAddressError("it has a blank in it; in a password write %20 for one")
    if not (scheme := _SCHEME.match(url)):
        raise WrongAddressError("it does not begin with a scheme")
    if scheme[0] == url:
        raise WrongAddressError("nothing follows the scheme")
    check_hosts(url)
    return url


_Layer = Annotated[int, Field(strict=True, ge=1)]
_Ratio = Annotated[float, Field(strict=True, ge=0, le=1)]
_Layers = Annotated[tuple[_Layer, ...], Field(min_length=1), AfterValidator(_ascending)]
_Ratios = Annotated[tuple[_Ratio, ...], Field(min_length=1)]
_Text = Annotated[str, Field(strict=True)]
_MAX = 2**62

Flag = Annotated[bool, BeforeValidator(read_flag), Allowed("flag", "true, yes, on, 1, false, no, off or 0")]
Count = Annotated[
    int, Field(strict=True, ge=1, le=_MAX), Allowed("whole number", "a whole number of 1 or more")
]
CountOrNull = Annotated[
    Annotated[int, Field(strict=True, ge=1, le=_MAX)] | None,
    Allowed("whole number", "null, or a whole number of 1 or more"),
]
CountOrZero = Annotated[
    int, Field(strict=True, ge=0, le=_MAX), Allowed("whole number", "a whole number of 0 or more")
]
OneOrTwoOrNull = Annotated[
    Annotated[int, Field(strict=True, ge=1, le=2)] | None, Allowed("whole number", "null, 1 or 2")
]
TwoOrMore = Annotated[
    int, Field(strict=True, ge=2, le=64), Allowed("whole number", "a whole number from 2 to 64")
]
GiB = Annotated[
    float,
    Field(strict=True, ge=0, le=2**20, allow_inf_nan=False),
    Allowed("number of GiB", "a finite number of GiB from 0 to 1048576"),
]
PositiveGiB = Annotated[
    float,
    Field(strict=True, gt=0, le=2**20, allow_inf_nan=False),
    Allowed("number of GiB", "a finite number of GiB above 0 and up to 1048576"),
]
Seconds = Annotated[
    float,
    Field(strict=True, gt=0, le=86400, allow_inf_nan=False),
    Allowed("number of seconds", "a number of seconds above 0 and up to 86400"),
]
Separator = Annotated[
    str, Field(strict=True, min_length=1), Allowed("text", "text of at least one character")
]
DiskPath = Annotated[
    _Text | None,
    BeforeValidator(_disk_path),
    Allowed("text", "null, a folder such as /var/cache/lwkv, or file:///var/cache/lwkv"),
]
SocketPath = Annotated[
    Annotated[str, Field(strict=True, max_length=107)] | None,
    BeforeValidator(_socket_path),
    Allowed("text", "null, or an absolute path of at most 107 characters such as /run/lwkv/host.sock"),
]
RemoteURL = Annotated[
    _Text | None,
    BeforeValidator(_remote_url),
    Allowed("text", "null, or a URL that begins with its scheme, such as redis:// in redis://host:6379"),
]
WritePolicy = Annotated[
    Literal["write_through", "write_back"], Allowed("text", "write_through or write_back")
]
PageCodecName = Annotated[
    Literal["auto", "raw", "lossless", "fp8"], Allowed("text", "auto, raw, lossless or fp8")
]
BlendSelector = Annotated[
    Literal["deviation", "query", "prefix_k"], Allowed("text", "deviation, query or prefix_k")
]
CheckLayers = Annotated[
    _Layers | None,
    BeforeValidator(_as_tuple),
    Allowed("whole numbers", "null, a layer number of 1 or more, or an ascending list of them"),
]
Ratios = Annotated[
    _Ratios | None,
    BeforeValidator(_as_tuple),
    Allowed("numbers", "null, a number from 0 to 1, or a list of them"),
]


class ExtraConfig(BaseModel):
    """The settings few people need, under `extra_config`. Frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    staging_bytes: CountOrNull = Field(
        default=None,
        description="Device memory for staging, all buffers together, in bytes; by default 1/256 of the "
        "device's, from 128 MiB to 256 MiB, and half as much again where loads have two streams.",
    )
    staging_buffers: TwoOrMore = Field(
        default=2,
        description="Staging buffers that take turns, for saves. Loads have twice as many, and one where "
        "they have one stream. More buffers are smaller, unless staging_bytes is larger.",
    )
    load_streams: OneOrTwoOrNull = Field(
        default=None,
        description="Streams of the device that loads use. 2: a kernel runs beside the next copy. 1: fewer "
        "calls to the driver, and one staging buffer. By default 1 in SGLang, 2 elsewhere.",
    )
    lookahead_layers: CountOrZero = Field(
        default=1,
        description="How many layers from lower tiers are queued before the model asks for them. 0: no layer "
        "is queued early, from host memory neither.",
    )
    group_bytes: CountOrZero = Field(
        default=32 << 20,
        description="Layers are saved several at a time as long as they have fewer bytes together.",
    )
    slab_bytes: Count = Field(
        default=256 << 20,
        description="Bytes of host memory that are page-locked at a time.",
    )
    host_memory_timeout_s: Seconds = Field(
        default=0.25,
        description="Longest wait for the owner of host_memory; after that nothing is found in it until it "
        "answers.",
    )
    host_memory_gib: GiB = Field(
        default=0.0,
        description="Size of the owner that an engine starts where none listens at host_memory; it ends five "
        "minutes after its last engine. 0: none is started.",
    )
    reserve_gib: GiB = Field(
        default=0.0,
        description="Host memory that is page-locked before the engine is created; the rest is locked "
        "afterwards, in the background.",
    )


def _no_extra(value: object) -> object:
    return {} if value is None else value


Extra = Annotated[
    ExtraConfig,
    BeforeValidator(_no_extra),
    Allowed("mapping", f"null, or a mapping with keys {', '.join(sorted(ExtraConfig.model_fields))}"),
]
