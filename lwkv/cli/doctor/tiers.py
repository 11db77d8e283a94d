"""What the doctor finds out about lower tiers: whether each can be used, and how it is."""

from __future__ import annotations

from lwkv.cli.doctor.report import Report
from lwkv.config.secrets import cut
from lwkv.config.settings import Config
from lwkv.errors import LwkvError
from lwkv.storage.registry import examine_tier, tier_urls
from lwkv.storage.tier import WARNING


def examine_tiers(report: Report, config: Config) -> None:
    """Look at every tier that `config` names; one that cannot be used is a fault."""
    for url in tier_urls(config):
        shown = cut(url)
        try:
            found = dict(examine_tier(url, config))
        except (LwkvError, OSError, RuntimeError) as error:
            report.faults.append(f"the tier {shown} cannot be used: {error}")
            continue
        if (warning := found.pop(WARNING, None)) is not None:
            report.advice.append(f"{shown}: {warning}")
        report.tiers[shown] = found
