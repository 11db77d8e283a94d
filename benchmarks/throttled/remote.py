"""The tier `throttled://RATE`: a remote store that gives RATE million bytes a second, in this process.

Whoever opens the same URL in this process has the same pages. `installed_in` makes a folder that, on Python's
path, makes the tier known.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lwkv.benchmarks.throttled.tier import ThrottledTier
from lwkv.config.settings import Config
from lwkv.errors import ConfigError
from lwkv.storage import TierSetup

_OPEN: dict[str, ThrottledTier] = {}


class Shared(ThrottledTier):
    """Stays as it is when one of those that have opened it closes it."""

    def close(self) -> None:
        pass


def open_tier(url: str, setup: TierSetup) -> ThrottledTier:
    """The tier of this URL. Raises ConfigError where it has no rate."""
    if url not in _OPEN:
        _OPEN[url] = Shared()
        _OPEN[url].seconds_per_byte = 1 / (1e6 * _rate(url))
    return _OPEN[url]


def examine(url: str, config: Config) -> Mapping[str, str]:
    """What `lwkv doctor` shows."""
    return {"rate": f"{_rate(url):g} MB/s"}


def installed_in(folder: Path) -> None:
    """Write into `folder` what makes Python find the tier, as an installed package would."""
    about = folder / "lwkv_throttled-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lwkv-throttled\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[lwkv.tiers]\nthrottled = {__name__}\n")


def _rate(url: str) -> float:
    try:
        rate = float(url.removeprefix("throttled://"))
    except ValueError:
        rate = 0.0
    if rate <= 0:
        raise ConfigError(f"{url!r} has no rate; write throttled://1000 for 1000 million bytes a second")
    return rate
