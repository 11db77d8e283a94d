"""One forward pass, with the KV cache's hooks around every layer's attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lwkv.reference.attention import attend
from lwkv.reference.batch import Batch
from lwkv.reference.cache import PagedCache
from lwkv.reference.hooks import KVSteps
from lwkv.reference.model.llama import Model

# Called with a phase and a layer, on the engine's thread: "start" of the layer, "wait" before the hook that
# waits for its load, "attend" after it, "end" after the layer's last operation is queued.
LayerMark = Callable[[str, int], None]


def no_mark(phase: str, layer: int) -> None:
    """Note nothing."""


@torch.no_grad()
def forward(
    model: Model, cache: PagedCache, batch: Batch, steps: KVSteps, mark: LayerMark = no_mark
) -> Tensor:
    """Compute a batch; returns the logits of each request's last new token, float32 (R, vocab_size).

    All work goes to the current stream of the model's device; the host waits for nothing but what the hooks
    of `steps` wait for.
    """
    hidden = model.embed(batch.tokens)
    cos, sin = model.rope.rows(batch.positions, batch.num_positions)
    for layer in range(model.shape.num_layers):
        mark("start", layer)
        q, k, v = model.project(layer, hidden, cos, sin)
        cache.write(layer, batch.blocks, batch.offsets, k, v)
        mark("wait", layer)
        steps.wait_for_layer_load(layer)
        mark("attend", layer)
        attended = attend(layer, q, cache, batch)
        steps.save_kv_layer(layer)
        hidden = model.finish(layer, hidden, attended)
        mark("end", layer)
    return model.logits(hidden[batch.last_rows])
