"""Loads on their way for which no stream waits."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from lwkv.pipeline.device_failures import DeviceFailuresTo
from lwkv.platforms import Event, Platform

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class LoadsApart:
    """Loads of all layers that are queued, behind which nothing is ordered before `wait`.

    For the thread that runs the forward pass. Host memory is held until they have ended, also if this is
    dropped. Until `have_arrived`, or behind `wait`, blocks are neither to be read nor given to others.

    Attributes:
        loaded: of each load, whether all of it is queued; False for all once the device has failed.
        arrivals: events behind all that is queued.
    """

    platform: Platform
    device: torch.device
    loaded: list[bool]
    arrivals: list[Event]

    def have_arrived(self) -> bool:
        """Whether the device is past all of them, or has failed; never blocks."""
        with DeviceFailuresTo(self._give_up):
            return all(self.platform.query(arrival) for arrival in self.arrivals)
        return True

    def wait(self) -> None:
        """Make the current stream wait for all of them: for nothing, once they have arrived."""
        with DeviceFailuresTo(self._give_up):
            stream = self.platform.current_stream(self.device)
            for arrival in self.arrivals:
                self.platform.wait_event(stream, arrival)

    def _give_up(self, error: BaseException) -> None:
        log.warning("%d loads have failed on their way: %s", len(self.loaded), repr(error))
        self.loaded = [False] * len(self.loaded)
        self.arrivals = []
