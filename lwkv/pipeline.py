"""The shared generators: every connector, tier and engine goes through these two.

A step of `retrieve_steps` queues a layer, if it is there, and makes the model wait for the one before it, so
that layer N + 1 travels while layer N computes; where layers come from a slow tier, the host blocks only for
the one that is computed next. A step of `store_steps` queues the layer that has just been computed.
The numbers of steps are fixed whatever happens: the engine advances them without asking.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol, TypeVar

import torch

Item = TypeVar("Item")


class Retrieval(Protocol):
    """What one batch to retrieve must offer. No method raises for a layer that does not arrive."""

    num_layers: int

    def open(self) -> list[int]:
        """Look up, pin and ask for the first layers; return each request's tokens that will be loaded."""

    def queue(self, layer: int) -> None:
        """Queue the loads up to `layer` that are there, and more where that keeps the link busy.

        Never blocks.
        """

    def wait(self, layer: int) -> None:
        """Make the current stream wait for `layer`, having queued what was left of the loads up to it.

        Blocks the host until the tiers have brought these, or their time is over.
        """

    def result(self) -> list[torch.Tensor]:
        """Tell for each request, bool (tokens,), which tokens were really queued in every layer."""

    def close(self) -> None:
        """Order the model behind what is in flight, and have everything released; idempotent.

        Comes from finalizers, too, on any thread: it takes no lock that a thread of lwkv may hold.
        """


class Storing(Protocol):
    """What one batch to store must offer."""

    num_layers: int

    def open(self) -> None:
        """Look up what is new and take pages for all its layers, or for nothing."""

    def queue(self, layer: int) -> None:
        """Queue the save of `layer`, which the current stream has just been told to compute."""

    def commit(self) -> None:
        """Make the chunks visible once their bytes have arrived."""

    def close(self) -> None:
        """Give up what was not committed once nothing is in flight; as for a retrieval."""


def retrieve_steps(
    retrieval: Retrieval, sync: bool, pick: Callable[[list[Any]], Item]
) -> Generator[Item | None, None, None]:
    """Drive `retrieval` in num_layers + 2 steps: counts, then None for every layer, then masks.

    What is yielded is `pick(counts)` and `pick(masks)`: all of a batch, or the one of a single request.

    Step i + 2 queues layer i, if it is there, and makes the current stream wait for layer i - 1, if `sync`.
    The last step queues what is left, makes the current stream wait for the last layer, releases everything
    and yields the masks.
    """
    try:
        yield pick(retrieval.open())
        for layer in range(retrieval.num_layers):
            retrieval.queue(layer)
            if sync and layer:
                retrieval.wait(layer - 1)
            yield None
        retrieval.wait(retrieval.num_layers - 1)
        masks = retrieval.result()
        retrieval.close()
        yield pick(masks)
    finally:
        retrieval.close()


def store_steps(storing: Storing) -> Generator[None, None, None]:
    """Drive `storing` in num_layers + 1 steps: one a layer, computed before the step, and one to commit."""
    try:
        storing.open()
        for layer in range(storing.num_layers):
            storing.queue(layer)
            yield None
        storing.commit()
        yield None
    finally:
        storing.close()
