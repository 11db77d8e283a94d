"""One engine for models whose layers keep different things: several kinds of caches in one host memory."""

from lwkv.hybrid.engine import HybridEngine, Pin
from lwkv.hybrid.group import Group
from lwkv.hybrid.lower_kinds import KindPages
from lwkv.hybrid.ranges import Load, Store
from lwkv.hybrid.steps import HybridSteps

__all__ = ["Group", "HybridEngine", "HybridSteps", "KindPages", "Load", "Pin", "Store"]
