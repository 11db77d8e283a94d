"""A remote tier with chunks that are named by numbers and tell by their bytes which they are."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from storage.places import make_setup, open_only
from storage.rig import key, keys

from lwkv.keys import LayerKey
from lwkv.storage import Status, Tier, TierSetup

LONG_S = 30.0
LAYERS = 3
PAGE_BYTES = 3000
ALL = [Status.OK] * LAYERS


@dataclass
class Place:
    """A tier at a URL."""

    url: str
    setup: TierSetup = field(default_factory=lambda: make_setup(PAGE_BYTES, LAYERS))
    tier: Tier = field(init=False)

    def __post_init__(self) -> None:
        self.tier = open_only(self.setup, remote_url=self.url)

    def put(self, number: int) -> list[Status]:
        """Put a chunk as the guard does: layer 0 last, and only where the others are there."""
        asked = key(number).split_layers(LAYERS)
        pages = [page_of(each) for each in asked]
        statuses = self.tier.put(asked[1:], pages[1:], LONG_S)
        if set(statuses) == {Status.OK}:
            return self.tier.put(asked[:1], pages[:1], LONG_S) + statuses
        return [Status.ERROR, *statuses]

    def store(self, *numbers: int) -> None:
        for number in numbers:
            assert self.put(number) == ALL

    def load(self, *numbers: int) -> list[list[Status]]:
        """The status of every layer of every chunk; what is OK must be right."""
        return [[self._load(each) for each in chunk.split_layers(LAYERS)] for chunk in keys(*numbers)]

    def there(self, *numbers: int) -> list[bool]:
        return self.tier.contains(keys(*numbers), LONG_S)

    def counted(self) -> dict[str, int]:
        return self.setup.counters.totals()

    def _load(self, asked: LayerKey) -> Status:
        page = torch.zeros(PAGE_BYTES, dtype=torch.uint8)
        [status] = self.tier.get([asked], [page], LONG_S)
        assert status is not Status.OK or torch.equal(page, page_of(asked))
        return status


def page_of(asked: LayerKey) -> torch.Tensor:
    seed = int.from_bytes(asked.chunk.hash, "little") * LAYERS + asked.layer
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (PAGE_BYTES,), dtype=torch.uint8, generator=random)
