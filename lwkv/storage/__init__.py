"""Where pages are kept: the host tier and, below it, disk and remote ones."""

from lwkv.storage.hold import MISSING, Hold, LayerPages
from lwkv.storage.host import Chunk, HostTier
from lwkv.storage.manager import StorageManager
from lwkv.storage.tier import Status, Tier
from lwkv.storage.write import Write

__all__ = ["MISSING", "Chunk", "Hold", "HostTier", "LayerPages", "Status", "StorageManager", "Tier", "Write"]
