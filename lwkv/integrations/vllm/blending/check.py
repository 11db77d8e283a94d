"""What is tried once at start: vLLM's layers, called one by one, give what its forward pass gives."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from lwkv.blend.paged_rows import PagedRows
from lwkv.connectors.rope import Rope
from lwkv.errors import ConfigError
from lwkv.integrations.vllm.blending.calls import States
from lwkv.kernels import Turn
from lwkv.kernels.rotation import rotate
from lwkv.platforms.protocol import Int64s

if TYPE_CHECKING:
    from lwkv.integrations.vllm.blending.layers import ModelLayers

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""By which moved keys, and rows computed apart, may differ, as a part of the largest value."""

BLOCK = 1
"""The block that is written to: vLLM's first one, its null block, is never handed out."""


class StartCheck:
    """Computes four tokens in several ways, in a block that no request has yet.

    Raises ConfigError where they differ: then blending would not compute what vLLM does.

    Args:
        model: as vLLM has loaded it.
        far: a position up to which keys are moved.
    """

    def __init__(
        self, model: Any, layers: ModelLayers, cache: PagedRows, block_size: int, rope: Rope, far: int
    ) -> None:
        self._model, self._layers, self._cache, self._rope = model, layers, cache, rope
        self._far = far
        self._slots: Int64s = BLOCK * block_size + np.arange(block_size)
        self._tokens = np.array([1, 2, 1, 2], np.int64)
        self._name = type(model).__name__

    @torch.inference_mode()
    def run(self) -> None:
        """Try it."""
        try:
            self._try()
        except (TypeError, AttributeError, RuntimeError) as error:
            self._refuse(f"its layers cannot be called one by one: {type(error).__name__}: {error}", error)

    def _try(self) -> None:
        whole = np.arange(len(self._tokens))
        own = self._forward(whole)
        written = self._rows(whole)
        for layer in range(self._layers.num_layers):
            at = self._at(whole)
            k, v = self._cache.read(layer, at)
            self._cache.write(layer, at, torch.zeros_like(k), torch.zeros_like(v))
        walked = self._walk(whole)
        if not torch.equal(own, walked):
            self._refuse("layers that are called one by one give other results than its own forward pass")
        for layer, ((k, v), (same_k, same_v)) in enumerate(zip(written, self._rows(whole), strict=True)):
            if not (torch.equal(k, same_k) and torch.equal(v, same_v) and bool(k.any())):
                self._refuse(f"rows of layer {layer} are not found in its blocks where vLLM writes them")
        self._check_apart(own)
        self._check_rope()

    def _check_apart(self, own: Tensor) -> None:
        """All but the second token, in two runs over the keys of all."""
        rows = np.array([0, 2, 3], np.int64)
        if not _near(self._walk(rows), own[torch.from_numpy(rows).to(own.device)]):
            self._refuse("tokens that are computed apart over cached keys differ from those of a prompt")

    def _check_rope(self) -> None:
        """A key that is moved is the key that the model computes there, in every layer.

        A token that sees only itself has the same states wherever it stands.
        """
        near, there = self._alone(0), self._alone(self._far)
        angles = torch.tensor(self._rope.frequencies, dtype=torch.float64) * self._far
        device = self._layers.device
        cos, sin = (part.float()[None].to(device) for part in (angles.cos(), angles.sin()))
        turn = Turn(cos, sin, torch.zeros(1, dtype=torch.int64, device=device), self._rope.interleaved)
        for layer, ((k, v), (k_there, v_there)) in enumerate(zip(near, there, strict=True)):
            rotate(k, turn)
            if not (_near(k, k_there) and _near(v, v_there)):
                self._refuse(f"keys of layer {layer} do not turn with their position as is configured")

    def _alone(self, position: int) -> list[tuple[Tensor, Tensor]]:
        """The KV in every layer of a token that is given `position`, and sees only itself."""
        first = np.zeros(1, np.int64)
        (call,) = self._layers.calls(first, self._slots)
        call = replace(call, positions=torch.full_like(call.positions, position))
        states = self._layers.embed(self._tokens[:1])
        for layer in range(self._layers.num_layers):
            states = self._layers.run(layer, [call], states)
        return self._rows(first)

    def _forward(self, positions: Int64s) -> Tensor:
        (call,) = self._layers.calls(positions, self._slots)
        ids = torch.from_numpy(self._tokens).to(self._layers.device)
        with self._layers.forward_context(call):
            hidden = self._model(
                input_ids=ids, positions=call.positions, intermediate_tensors=None, inputs_embeds=None
            )
        if not isinstance(hidden, Tensor):
            self._refuse(f"its forward pass returns {type(hidden).__name__}, not the states of its tokens")
        return hidden.clone()

    def _walk(self, positions: Int64s) -> Tensor:
        calls = self._layers.calls(positions, self._slots)
        states: States = self._layers.embed(self._tokens[positions])
        for layer in range(self._layers.num_layers):
            states = self._layers.run(layer, calls, states)
        return self._layers.finish(states)

    def _at(self, positions: Int64s) -> Any:
        return self._cache.at(self._cache.send(self._slots[positions]))

    def _rows(self, positions: Int64s) -> list[tuple[Tensor, Tensor]]:
        at = self._at(positions)
        return [self._cache.read(layer, at) for layer in range(self._layers.num_layers)]

    def _refuse(self, what: str, cause: Exception | None = None) -> NoReturn:
        raise ConfigError(
            f"enable_blending: {self._name} cannot be blended: {what}; set enable_blending to false"
        ) from cause


def _near(found: Tensor, wanted: Tensor) -> bool:
    allowed = TOLERANCE.get(found.dtype, 0.0) * float(wanted.abs().max())
    return bool((found.float() - wanted.float()).abs().max() <= allowed)
