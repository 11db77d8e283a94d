"""Whether there can be as much host memory as is configured: else the system ends the process later."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lwkv.config.settings import Config
from lwkv.errors import ConfigError
from lwkv.platforms.host_limits import MemoryLimit

log = logging.getLogger(__name__)

MOST_SHARE = 0.8
_GIB = 1 << 30


def check_memory(config: Config, limits: Sequence[MemoryLimit]) -> None:
    """Raise ConfigError for what cannot be, and log what is tight."""
    refuse_too_much(config, limits)
    if warning := warning_of(config, limits):
        log.warning("%s", warning)


def refuse_too_much(config: Config, limits: Sequence[MemoryLimit]) -> None:
    """Raise ConfigError where host memory is to be larger than a limit, or what is locked at start than what
    is free."""
    for limit in limits:
        if config.max_host_bytes > limit.total:
            raise ConfigError(
                f"max_local_cpu_size: got {config.max_local_cpu_size:g} GiB, but {_size(limit)}: the system "
                f"would end the process when that is full; lower max_local_cpu_size{_or_raise(limit)}"
            )
        if config.reserve_bytes > limit.free:
            raise ConfigError(
                f"extra_config.reserve_gib: got {config.reserve_bytes / _GIB:g} GiB to lock at start, but "
                f"{_size(limit)}, of which {gib(limit.free)} are free; lower reserve_gib{_or_raise(limit)}"
            )


def warning_of(config: Config, limits: Sequence[MemoryLimit]) -> str | None:
    """Say what to do where host memory may take over 80 % of what is free; None where it may not."""
    for limit in limits:
        if config.max_host_bytes > MOST_SHARE * limit.free:
            return (
                f"max_local_cpu_size is {config.max_local_cpu_size:g} GiB, over {100 * MOST_SHARE:.0f} % of "
                f"what is free: {_size(limit)}, of which {gib(limit.free)} are free. The rest of the process "
                f"needs memory as well: lower max_local_cpu_size{_or_raise(limit)}"
            )
    return None


def _size(limit: MemoryLimit) -> str:
    return f"{limit.what} is {gib(limit.total)}"


def gib(num_bytes: int) -> str:
    """Bytes as GiB, as text."""
    return f"{num_bytes / _GIB:.2f} GiB"


def _or_raise(limit: MemoryLimit) -> str:
    how = ", or give the container more (docker run --memory, Kubernetes resources.limits.memory)"
    return how if limit.is_container else ""
