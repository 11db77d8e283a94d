"""Where pages are kept: the host tier and, below it, disk and remote ones."""

from lwkv.storage.hold import Hold, LayerPages
from lwkv.storage.host_tier import Chunk, HostTier
from lwkv.storage.manager import StorageManager
from lwkv.storage.tier import Missing, Status, Tier, TierSetup
from lwkv.storage.write import UnnamedWrite, Write

__all__ = [
    "Chunk",
    "Hold",
    "HostTier",
    "LayerPages",
    "Missing",
    "Status",
    "StorageManager",
    "Tier",
    "TierSetup",
    "UnnamedWrite",
    "Write",
]
