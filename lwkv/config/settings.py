"""What a user may set: defaults, then a YAML file, then the environment (LWKV_*), then arguments."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from lwkv.config.conflicts import refuse_conflicts
from lwkv.config.help import show_settings
from lwkv.config.lmcache import without_lmcache_keys
from lwkv.config.messages import (
    Origins,
    allowed_of,
    clipped,
    explain,
    joined,
    shown,
    unknown_key,
)
from lwkv.config.secrets import cut_inside, is_address, is_secret
from lwkv.config.sources import PREFIX, read_environment, read_file
from lwkv.config.values import (
    CHECK_LAYERS,
    RECOMPUTE_RATIOS,
    CheckLayers,
    Count,
    CountOrZero,
    DiskPath,
    Extra,
    ExtraConfig,
    Flag,
    GiB,
    Ratios,
    RemoteURL,
    Seconds,
    Separator,
    WritePolicy,
)
from lwkv.errors import ConfigError

_GIB = 1 << 30


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

    chunk_size: Count = Field(256, description="Tokens of a chunk, the unit of hashing, lookup and eviction.")
    local_cpu: Flag = Field(
        True,
        description="Keep pages in host memory; false: they pass through it, to and from lower tiers.",
    )
    max_local_cpu_size: GiB = Field(5.0, description="Most host memory for pages, kept or passing through.")
    local_disk: DiskPath = Field(None, description="Folder of the disk tier; null for none.")
    max_local_disk_size: GiB = Field(0.0, description="Most disk space for pages; needed with local_disk.")
    # It may have a password in it.
    remote_url: RemoteURL = Field(None, repr=False, description="Server of the remote tier; null for none.")
    write_policy: WritePolicy = Field(
        "write_through",
        description="When lower tiers get a chunk: write_through at once, write_back when half of host "
        "memory is full of chunks that they lack, and at flush and close.",
    )
    use_layerwise: Flag = Field(False, description="Load and save layer by layer while the model computes.")
    enable_blending: Flag = Field(
        False, description="Reuse chunks that are not a prefix, and recompute a few of their tokens."
    )
    use_gpu: Flag = Field(
        True, description="Stage many chunks at a time on the device; false for one. Blending needs true."
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
        origins = origins or Origins()
        values: dict[str, Any] = without_lmcache_keys(arguments, origins)
        _refuse_unknown(values, origins)
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(explain(error, type(self), values, origins)) from None
        refuse_conflicts(self, origins)

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None, **arguments: object) -> Config:
        """Merge the YAML file, the environment and `arguments`, each stronger than the one before.

        A key is taken as a whole from the strongest source that has it, `extra_config` included.

        Args:
            path: the file; None for the one LWKV_CONFIG_FILE names, or no file.
        """
        kinds = {key: allowed_of(cls, key).kind for key in cls.model_fields}
        file = _read_named_file(path, os.environ)
        environment = read_environment(os.environ, kinds)
        origins = dict.fromkeys(file, f"file {clipped(f'{_file_name(path, os.environ)}')}")
        origins |= {key: _variable(key, os.environ) for key in environment}
        origins |= dict.fromkeys(arguments, "argument")
        return cls(Origins(origins), **(file | environment | arguments))

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
    def staging_bytes(self) -> int | None:
        """Device memory for all staging buffers together, each a page at least; None as the device has it."""
        return self.extra_config.staging_bytes if self.use_gpu else 0

    @property
    def staging_buffers(self) -> int:
        return self.extra_config.staging_buffers

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


def _read_named_file(path: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> dict[str, object]:
    name = _file_name(path, environ)
    told_by = f"environment variable {PREFIX}CONFIG_FILE" if path is None else "argument path"
    return {} if name is None else read_file(name, told_by)


def _variable(key: str, environ: Mapping[str, str]) -> str:
    name = f"{PREFIX}{key.upper()}"
    if is_address(key) or is_secret(environ[name]):
        return f"environment variable {name}"
    return f"environment variable {name}={clipped(environ[name])}"


def _refuse_unknown(values: Mapping[str, object], origins: Origins) -> None:
    known = Config.model_fields
    unknown = [key for key in values if key not in known]
    if unknown:
        raise ConfigError(
            joined(unknown_key(key, values[key], origins.get(key, "argument"), known) for key in unknown)
        )
