"""The public generators: the cursors of retrievals and stores, in fixed numbers of steps.

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
    retrieval: BatchRetrieval, pick: Callable[[list[Any]], Item]
) -> Generator[Item | None, None, None]:
    """Advance `retrieval` in num_layers + 2 steps: counts, then None for every layer, then masks.

    What is yielded is `pick(counts)` and `pick(masks)`: all of a batch, or the one of a single request. The
    last step releases everything before it yields.
    """
    try:
        yield pick(retrieval.open())
        for layer in range(retrieval.num_layers):
            retrieval.advance(layer)
            yield None
        yield pick(retrieval.finish())
    finally:
        retrieval.close()


def store_steps(storing: BatchStoring) -> Generator[None, None, None]:
    """Advance `storing` in num_layers + 1 steps: one a layer, computed before the step, and one to commit."""
    try:
        for layer in range(storing.num_layers):
            storing.advance(layer)
            yield None
        storing.commit()
        yield None
    finally:
        storing.close()
