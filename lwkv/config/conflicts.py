"""CheckedSettings that are fine each and cannot work together."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from itertools import pairwise
from operator import attrgetter
from typing import Literal, Protocol

from lwkv.config.messages import Origins, shown
from lwkv.config.values import CHECK_LAYERS, RECOMPUTE_RATIOS, ExtraConfig

Conflict = tuple[tuple[str, ...], str]


class CheckedSettings(Protocol):
    """What is looked at of a `Config`, whose module imports this one."""

    enable_blending: bool
    use_layerwise: bool
    use_gpu: bool
    blend_selector: Literal["deviation", "query", "prefix_k"]
    blend_check_layers: tuple[int, ...] | None
    blend_recompute_ratios: tuple[float, ...] | None
    local_cpu: bool
    host_memory: str | None
    local_disk: str | None
    remote_url: str | None
    write_policy: Literal["write_through", "write_back"]
    extra_config: ExtraConfig

    @property
    def max_host_bytes(self) -> int: ...

    @property
    def max_disk_bytes(self) -> int: ...

    @property
    def reserve_bytes(self) -> int: ...

    @property
    def model_fields_set(self) -> set[str]: ...


def find_conflicts(
    config: CheckedSettings, origins: Origins, unknown: Container[str] = (), more: Iterable[Conflict] = ()
) -> list[str]:
    """Every contradiction, a line each: the keys, their values and where they came from.

    Args:
        unknown: settings whose values are not those that the user meant; conflicts with them are left out.
        more: contradictions of whoever extends the settings.
    """
    return [
        f"{' and '.join(_told(config, key, origins) for key in keys)}: {advice}"
        for keys, advice in [*_blending(config), *_staging(config), *_tiers(config), *more]
        if not any(key.split(".")[0] in unknown for key in keys)
    ]


def _told(config: CheckedSettings, key: str, origins: Origins) -> str:
    field = key.split(".")[0]
    unnamed = "argument" if field in config.model_fields_set else "default"
    return f"{key}={shown(attrgetter(key)(config))} ({origins.get(field, unnamed)})"


def _blending(config: CheckedSettings) -> Iterator[Conflict]:
    if not config.enable_blending:
        return
    if not config.use_layerwise:
        yield ("enable_blending", "use_layerwise"), "blending goes layer by layer; set use_layerwise to true"
    if not config.use_gpu:
        yield (
            ("enable_blending", "use_gpu"),
            "blending needs the staging buffer on the device; set use_gpu to true",
        )
    if config.blend_selector != "deviation" and config.blend_check_layers is not None:
        advice = "only deviation has check layers; leave blend_check_layers out, or choose by deviation"
        yield ("blend_selector", "blend_check_layers"), advice
    yield from _ratios(len(config.blend_check_layers or CHECK_LAYERS), config.blend_recompute_ratios)


def _ratios(layers: int, given: tuple[float, ...] | None) -> Iterator[Conflict]:
    ratios = given or RECOMPUTE_RATIOS
    if layers != len(ratios):
        advice = (
            f"there are {layers} check layers, and ratios for {len(ratios)}; give every check layer its ratio"
        )
        yield ("blend_check_layers", "blend_recompute_ratios"), advice
    if any(a < b for a, b in pairwise(ratios)):
        advice = "each check layer picks among the tokens that the one before it picked; let ratios descend"
        yield ("blend_recompute_ratios",), advice
    elif ratios[0] > 0 and ratios[-1] == 0:
        advice = "the last ratio is the share of tokens that is computed; set it above 0, or all ratios to 0"
        yield ("blend_recompute_ratios",), advice


def _staging(config: CheckedSettings) -> Iterator[Conflict]:
    if not config.use_gpu and config.extra_config.staging_bytes is not None:
        yield (
            ("use_gpu", "extra_config.staging_bytes"),
            "without use_gpu a staging buffer holds one page; leave staging_bytes out or set use_gpu to true",
        )


def _tiers(config: CheckedSettings) -> Iterator[Conflict]:
    if config.max_host_bytes == 0:
        advice = "pages are in host memory at least while they are moved; give it a GiB or more"
        yield ("local_cpu", "max_local_cpu_size"), advice
    if config.write_policy == "write_back" and not config.local_cpu:
        advice = (
            "what host memory does not keep is written at once; set write_policy to write_through, or "
            "local_cpu to true"
        )
        yield ("write_policy", "local_cpu"), advice
    if config.host_memory and not config.local_cpu:
        advice = "what is in the memory of a node is kept there; set local_cpu to true"
        yield ("host_memory", "local_cpu"), advice
    if config.extra_config.host_memory_gib and not config.host_memory:
        advice = "it is the size of the owner at that socket; say where, or leave host_memory_gib out"
        yield ("extra_config.host_memory_gib", "host_memory"), advice
    if config.local_disk and config.max_disk_bytes == 0:
        yield ("local_disk", "max_local_disk_size"), "give the disk tier a size above 0"
    if not (config.local_cpu or config.local_disk or config.remote_url):
        yield (
            ("local_cpu", "local_disk", "remote_url"),
            "there is no tier to keep pages in; switch one of them on",
        )
    if config.reserve_bytes > config.max_host_bytes:
        advice = "reserve_gib is a part of max_local_cpu_size; lower the first or raise the second"
        yield ("extra_config.reserve_gib", "max_local_cpu_size"), advice
