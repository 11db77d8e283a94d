"""The shared generators: every connector, tier and engine goes through these two.

A step of `retrieve_steps` queues a layer, if it is there, and makes the model wait for the one before it, so
that layer N + 1 travels while layer N computes; where layers come from a slow tier, the host blocks only for
the one that is computed next. A step of `store_steps` queues the layer that has just been computed.
The numbers of steps are fixed whatever happens: the engine advances them without asking.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

from lwkv.pipeline.retrieval import BatchRetrieval
from lwkv.pipeline.store import BatchStoring

Item = TypeVar("Item")


def retrieve_steps(
    retrieval: BatchRetrieval, sync: bool, pick: Callable[[list[Any]], Item]
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


def store_steps(storing: BatchStoring) -> Generator[None, None, None]:
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
