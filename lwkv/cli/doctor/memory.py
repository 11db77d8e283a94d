"""The doctor's look at host memory: what machine and container allow, and whether the settings fit."""

from __future__ import annotations

from lwkv.cli.doctor.report import Report
from lwkv.config.settings import Config
from lwkv.errors import ConfigError
from lwkv.platforms.host_limits import read_limits, read_lock_limit
from lwkv.pool.memory_limits import gib, refuse_too_much, warning_of
from lwkv.shared_host.client.connecting import NoOwnerError
from lwkv.shared_host.client.status import read_status
from lwkv.shared_host.numa import ON_NODE, on_nodes


def examine_memory(report: Report, config: Config | None) -> None:
    """Fill in the limits of host memory; what does not fit is a fault, what hardly fits is advice."""
    limits, locked = read_limits(), read_lock_limit()
    report.memory = {limit.what: f"{gib(limit.total)}, {gib(limit.free)} free" for limit in limits}
    report.memory["locked memory (ulimit -l)"] = (
        "no limit"
        if locked is None
        else f"{locked >> 10} KiB; RDMA counts against it, a GPU's driver mostly does not"
    )
    if config is None:
        return
    if config.host_memory is not None:
        _examine_owner(report, config.host_memory, config.extra_config.host_memory_gib)
        return
    report.memory["max_local_cpu_size"] = f"{config.max_local_cpu_size:g} GiB, page-locked in the background"
    try:
        refuse_too_much(config, limits)
    except ConfigError as error:
        report.faults.append(str(error))
    else:
        report.advice += [warning] if (warning := warning_of(config, limits)) else []


def _examine_owner(report: Report, path: str, start_gib: float) -> None:
    """Show what the owner of `host_memory` has; one that is not there is a fault, if no engine starts it."""
    try:
        found = read_status(path)
    except (ConfigError, NoOwnerError) as error:
        if start_gib and isinstance(error, NoOwnerError):
            report.memory[f"host_memory {path}"] = (
                f"no owner: the first engine starts one of {start_gib:g} GiB"
            )
            return
        report.faults.append(
            f"host_memory={path}: {error}; start one with: lwkv host --size GIB --socket {path}"
        )
        return
    in_use = found["bytes_in_use"]
    by_node = {int(name.removeprefix(ON_NODE)): n for name, n in found.items() if name.startswith(ON_NODE)}
    nodes = f"; {on_nodes(by_node)}" if by_node else ""
    report.memory[f"host_memory {path}"] = (
        f"{gib(found['bytes'])}, {gib(in_use)} in use: {found['chunks']} chunks, {found['clients']} engines"
        + nodes
    )
