"""What a user may set: defaults, then a YAML file, then the environment (LWKV_*), then arguments."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from lwkv.config.conflicts import Conflict, find_conflicts
from lwkv.config.engine_settings import ENGINE_SETTINGS
from lwkv.config.help import show_settings
from lwkv.config.lmcache import find_lmcache_url, take_lmcache_keys
from lwkv.config.messages import (
    Origins,
    allowed_of,
    clipped,
    explain,
    joined,
    keys_of,
    nearest,
    shown,
    unknown_key,
)
from lwkv.config.other_engines import refuse_other_engines
from lwkv.config.secrets import cut_inside, is_address, is_secret
from lwkv.config.sources import PREFIX, Read, read_environment, read_file
from lwkv.config.values import (
    CHECK_LAYERS,
    RECOMPUTE_RATIOS,
    BlendSelector,
    CheckLayers,
    Count,
    CountOrZero,
    DiskPath,
    Extra,
    ExtraConfig,
    Flag,
    GiB,
    PageCodecName,
    PositiveGiB,
    Ratios,
    RemoteURL,
    Seconds,
    Separator,
    SocketPath,
    WritePolicy,
)
from lwkv.errors import ConfigError

_GIB = 1 << 30
Own = TypeVar("Own", bound="Config")


@show_settings
class Config(BaseSettings):
    """The settings of one cache engine. Frozen, hashable, and checked as a whole when it is made.

    `Config(**arguments)` knows its arguments and the defaults only; `Config.load` reads file and environment.
    Sizes are in GiB, times in seconds. LMCache's keys have LMCache's names and meaning.

    Raises:
        ConfigError: a key is unknown, a value is not allowed, or settings contradict each other. The text has
            the key, the value got, where it came from and what is allowed.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_prefix=PREFIX)

    usual_load_streams: ClassVar[int] = 2
    place_of_arguments: ClassVar[str] = "argument"

    chunk_size: Count = Field(
        256,
        description="Tokens of a chunk, the unit of hashing, look-up and eviction; with several groups of "
        "caches the nearest multiple of their blocks, with states the smallest.",
    )
    local_cpu: Flag = Field(
        True,
        description="Keep pages in host memory; false: they are only buffered there, on the way to and from "
        "lower tiers.",
    )
    max_local_cpu_size: PositiveGiB = Field(
        5.0, description="Most host memory for pages, kept or passing through."
    )
    host_memory: SocketPath = Field(
        None,
        description="Socket of `lwkv host`, whose memory the engines of a machine share; null for memory of "
        "this process alone.",
    )
    local_disk: DiskPath = Field(None, description="Folder of the disk tier; null for none.")
    max_local_disk_size: GiB = Field(0.0, description="Most disk space for pages; needed with local_disk.")
    remote_url: RemoteURL = Field(None, description="Server of the remote tier; null for none.")
    write_policy: WritePolicy = Field(
        "write_through",
        description="When lower tiers get a chunk: write_through at once, write_back when half of host "
        "memory is full of chunks that they lack, and at flush and close.",
    )
    page_codec: PageCodecName = Field(
        "auto",
        description="How pages are kept: raw; lossless, bfloat16 in about 0.77 of its bytes, which come back "
        "bit for bit; fp8, floats in one byte, which changes the values; auto takes raw or lossless.",
    )
    use_layerwise: Flag = Field(False, description="Load and save layer by layer while the model computes.")
    enable_blending: Flag = Field(
        False, description="Reuse chunks that are not a prefix, and recompute a few of their tokens."
    )
    use_gpu: Flag = Field(
        True, description="Stage many chunks at a time on the device; false for one. Blending needs true."
    )
    blend_selector: BlendSelector = Field(
        "deviation",
        description="Which tokens are recomputed: those that changed most at the check layers (deviation), "
        "those that the question looks at (query), or the first of each part (prefix_k).",
    )
    blend_recompute_ratios: Ratios = Field(
        None, description="Share of the tokens that each check layer picks to recompute; null means 0.15."
    )
    blend_check_layers: CheckLayers = Field(
        None, description="Layers at which blending picks the tokens to recompute; null means 1."
    )
    blend_min_tokens: CountOrZero = Field(256, description="Requests with fewer tokens are not blended.")
    blend_special_str: Separator = Field(
        " # # ", description="Text that separates the parts of a prompt that are cached one by one."
    )
    save_unfull_chunk: Flag = Field(
        False, description="Store the last chunk of a prompt even if it is not full."
    )
    save_decode_cache: Flag = Field(False, description="Store generated tokens too.")
    prefetch_layers: CountOrZero = Field(
        2, description="Layers that lower tiers are asked for ahead of the load."
    )
    load_timeout_s: Seconds = Field(
        10.0, description="Longest wait for a layer from a lower tier; after that it is a miss."
    )
    extra_config: Extra = Field(ExtraConfig(), description="The keys of the second table.")

    def __init__(self, origins: Origins | None = None, /, **arguments: object) -> None:
        if not isinstance(origins, Origins | None):
            raise ConfigError(
                f"got {shown(origins)} without a name: name settings, as in Config(chunk_size=256); "
                "to read a file use Config.load(path)"
            )
        if faults := list(self._faults(arguments, Origins() if origins is None else origins)):
            raise ConfigError(joined(faults))

    def _faults(self, arguments: Mapping[str, object], origins: Origins) -> Iterator[str]:
        """Take the settings, and say what is wrong with them: all of it, so that one start is enough."""
        yield from origins.faults
        known, wrong = type(self).model_fields, origins.unread
        given, of_lmcache = take_lmcache_keys(arguments, origins)
        yield from of_lmcache
        yield from find_lmcache_url(given.get("remote_url"), origins)
        values: dict[str, Any] = {key: value for key, value in given.items() if key in known}
        yield from refuse_other_engines(given, known, origins)
        for key in (key for key in given if key not in known and key not in ENGINE_SETTINGS):
            wrong = wrong | nearest(key, known)
            yield unknown_key(key, given[key], origins.get(key, "argument"), known)
        try:
            super().__init__(**values)
        except ValidationError as error:
            yield from explain(error, type(self), values, origins)
            wrong = wrong | keys_of(error)
            # The others are looked at without them.
            super().__init__(**{key: value for key, value in values.items() if key not in wrong})
        yield from find_conflicts(self, origins, wrong, self._more_conflicts())

    def _more_conflicts(self) -> Iterator[Conflict]:
        """What cannot work where these settings are used; for those who extend them."""
        yield from ()

    @classmethod
    def load(cls: type[Own], path: str | os.PathLike[str] | None = None, **arguments: object) -> Own:
        """Merge the YAML file, the environment and `arguments`, each stronger than the one before.

        A key is taken as a whole from the strongest source that has it, `extra_config` included.

        Args:
            path: the file; None for the one LWKV_CONFIG_FILE names, or no file.
        """
        values, origins = cls._merge(path, arguments)
        return cls(origins, **values)

    @classmethod
    def sources(cls, path: str | os.PathLike[str] | None = None, **arguments: object) -> dict[str, str]:
        """Where `load` takes each setting from, "default" where nothing gives it; no value is a password."""
        _, origins = cls._merge(path, arguments)
        return {key: origins.get(key, "default") for key in cls.model_fields}

    @classmethod
    def given(cls, path: str | os.PathLike[str] | None = None) -> frozenset[str]:
        """The names of what file and environment give, also of what is no setting of this class."""
        values, _ = cls._merge(path, {})
        variables = {name.removeprefix(PREFIX).lower() for name in os.environ if name.startswith(PREFIX)}
        return frozenset(values) | variables

    @classmethod
    def _merge(
        cls, path: str | os.PathLike[str] | None, arguments: Mapping[str, object]
    ) -> tuple[dict[str, object], Origins]:
        kinds = {key: allowed_of(cls, key).kind for key in cls.model_fields}
        environment = read_environment(os.environ, kinds)
        try:
            file = _read_named_file(path, os.environ)
        except ConfigError as error:
            # What it would have set is not known.
            file, unread = Read({}, [str(error)]), frozenset(cls.model_fields)
        else:
            unread = frozenset()
        origins = Origins(dict.fromkeys(file.values, f"file {clipped(f'{_file_name(path, os.environ)}')}"))
        origins.faults, origins.unread = [*file.faults, *environment.faults], unread
        origins |= {key: _variable(key, os.environ) for key in environment.values}
        origins |= dict.fromkeys(arguments, cls.place_of_arguments)
        return file.values | environment.values | dict(arguments), origins

    def __repr_args__(self) -> Iterator[tuple[str | None, object]]:
        for name, value in super().__repr_args__():
            yield name, cut_inside(value) if isinstance(value, str) else value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Leave everything but the arguments to `load`, which knows where each value came from."""
        return (init_settings,)

    @property
    def max_host_bytes(self) -> int:
        return int(self.max_local_cpu_size * _GIB)

    @property
    def max_disk_bytes(self) -> int:
        return int(self.max_local_disk_size * _GIB)

    @property
    def reserve_bytes(self) -> int:
        """Host memory to page-lock at start."""
        return int(self.extra_config.reserve_gib * _GIB)

    @property
    def why_raw_pages(self) -> str | None:
        """Why pages stay raw where `page_codec` is "auto", whatever the device; None if it decides."""
        return "lossless was not measured with blending" if self.enable_blending else None

    @property
    def staging_bytes(self) -> int | None:
        """Device memory for all staging buffers together, each a page at least; None as the device has it."""
        return self.extra_config.staging_bytes if self.use_gpu else 0

    @property
    def staging_buffers(self) -> int:
        return self.extra_config.staging_buffers

    @property
    def load_streams(self) -> int:
        """Streams of the device for loads: one for copies and kernels together, or one for each."""
        return self.extra_config.load_streams or self.usual_load_streams

    @property
    def lookahead_layers(self) -> int:
        """Layers whose load is queued before the model asks for them."""
        return self.extra_config.lookahead_layers

    @property
    def group_bytes(self) -> int:
        """Layers are saved several at a time up to so many bytes together."""
        return self.extra_config.group_bytes

    @property
    def slab_bytes(self) -> int:
        return self.extra_config.slab_bytes

    @property
    def blend_plan(self) -> tuple[tuple[int, float], ...]:
        """The check layers, each with the share of tokens to recompute there; empty without blending."""
        if not self.enable_blending:
            return ()
        layers = self.blend_check_layers or CHECK_LAYERS
        return tuple(zip(layers, self.blend_recompute_ratios or RECOMPUTE_RATIOS, strict=True))


def _file_name(path: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> str | None:
    return environ.get(f"{PREFIX}CONFIG_FILE") if path is None else os.fspath(path)


def _read_named_file(path: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> Read:
    name = _file_name(path, environ)
    told_by = f"environment variable {PREFIX}CONFIG_FILE" if path is None else "argument path"
    return Read({}, []) if name is None else read_file(name, told_by)


def _variable(key: str, environ: Mapping[str, str]) -> str:
    name = f"{PREFIX}{key.upper()}"
    if is_address(key) or is_secret(environ[name]):
        return f"environment variable {name}"
    return f"environment variable {name}={clipped(environ[name])}"
