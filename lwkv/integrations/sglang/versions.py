"""Which SGLang this works with."""

from __future__ import annotations

from lwkv.errors import ConfigError

VERSIONS = ("0.5.23",)
"""SGLang's linkers are new and change from release to release: what was not tested is refused."""


def check_version(version: str) -> None:
    """Refuse an SGLang that was not tested. Raises ConfigError with the version got and those that work."""
    if version.partition("+")[0] not in VERSIONS:
        raise ConfigError(
            f"SGLang {version}: lwkv works with {', '.join(VERSIONS)}; install that one, or an lwkv made for "
            f"{version}"
        )
