"""What is tried once at start: vLLM's layers, called one by one, give what its forward pass gives."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from lwkv.blend.forward.attention import attend
from lwkv.blend.forward.paged_rows import PagedRows
from lwkv.connectors.rope import Rope
from lwkv.errors import ConfigError
from lwkv.integrations.vllm.blending.model.calls import Call, States
from lwkv.kernels import Turn
from lwkv.kernels.rotation import rotate
from lwkv.platforms.protocol import Int64s

if TYPE_CHECKING:
    from lwkv.integrations.vllm.blending.model.layers import ModelLayers

log = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""By which moved keys may differ, as a part of the largest value: vLLM keeps cosines in the model's dtype."""

HALVES = (torch.float16, torch.bfloat16)

BLOCK = 1
"""The block that is written to: vLLM's first one, its null block, is never handed out."""


class StartCheck:
    """Computes four tokens in several ways, in a block that no request has yet.

    Raises ConfigError where they differ: then blending would not compute what vLLM does.

    Args:
        model: as vLLM has loaded it.
        far: a position up to which keys are moved.
        asks: whether tokens are chosen by what a question looks at.
    """

    def __init__(
        self,
        model: Any,
        layers: ModelLayers,
        cache: PagedRows,
        block_size: int,
        rope: Rope,
        far: int,
        asks: bool = False,
    ) -> None:
        self._model, self._layers, self._cache, self._rope = model, layers, cache, rope
        self._far, self._asks = far, asks
        self._slots: Int64s = BLOCK * block_size + np.arange(block_size)
        self._tokens = np.array([1, 2, 1, 2], np.int64)
        self._name = type(model).__name__

    @torch.inference_mode()
    def run(self) -> None:
        """Try it."""
        try:
            with self._layers.eagerly():
                self._try()
        except (TypeError, AttributeError, RuntimeError) as error:
            self._refuse(f"its layers cannot be called one by one: {type(error).__name__}: {error}", error)

    def _try(self) -> None:
        whole = np.arange(len(self._tokens))
        self._check_flat()
        own = self._forward(whole)
        written = self._rows(whole)
        for layer in range(self._layers.num_layers):
            at = self._at(whole)
            k, v = self._cache.read(layer, at)
            self._cache.write(layer, at, torch.zeros_like(k), torch.zeros_like(v))
        what = "layers that are called one by one give other results than its own forward pass"
        self._require_same(what, self._walk(whole), own)
        for layer, (wanted, found) in enumerate(zip(written, self._rows(whole), strict=True)):
            what = f"rows of layer {layer} are not found in its blocks where vLLM writes them"
            if not wanted[0].any():
                self._refuse(f"{what}: its keys are all 0")
            for part in zip(found, wanted, strict=True):
                self._require_same(what, *part)
        self._check_apart(own)
        self._check_seen()
        self._check_rope()

    def _check_flat(self) -> None:
        """Layers without modules around their kernels give the same bits, or are called as they are."""
        whole = np.arange(len(self._tokens))
        calls, states = self._layers.calls(whole, self._slots), self._layers.embed(self._tokens)
        others = []
        for layer in range(self._layers.num_layers):
            found = self._try_flat(layer, calls, States(*map(_copy, states)))
            states = self._layers.run_modules(layer, calls, states)
            if found is None or not torch.equal(_both(found), _both(states)):
                others.append(layer)
                self._layers.flat[layer] = None
        if others:
            log.info("at the start: layers %s are called with all of their modules: else they differ", others)

    def _try_flat(self, layer: int, calls: Sequence[Call], states: States) -> States | None:
        try:
            return self._layers.run(layer, calls, states)
        except (TypeError, AttributeError, RuntimeError):
            return None

    def _check_apart(self, own: Tensor) -> None:
        """All but the second token, in two runs over the keys of all."""
        rows = np.array([0, 2, 3], np.int64)
        wanted = own[torch.from_numpy(rows).to(own.device)]
        allowed = max(TOLERANCE.get(own.dtype, 0.0), self._rounding(own.dtype))
        what = "tokens that are computed apart over cached keys differ from those of a prompt"
        self._require_near(what, self._walk(rows, by_rows=False), wanted, allowed)
        if self._layers.row_attentions is not None:
            found = self._walk(rows, by_rows=True)
            self._require_near(f"{what}, by lwkv's kernel", found, wanted, allowed)

    def _check_seen(self) -> None:
        """What is seen of each layer's attention is what is written, and explains what it gives."""
        whole = np.arange(len(self._tokens))
        calls, states = self._layers.calls(whole, self._slots), self._layers.embed(self._tokens)
        for layer in range(self._layers.num_layers):
            new = self._layers.keys_and_values(layer, calls, states)
            seen = self._layers.run_seen(layer, calls, states)
            states = seen.states
            k, v = self._cache.read(layer, self._at(whole))
            for part, written in zip(new, (k, v), strict=True):
                what = f"keys or values of layer {layer} that its attention gets are not those that it writes"
                self._require_same(what, part, written)
            if self._asks:
                self._require_near(
                    f"attention of layer {layer} is not plain softmax of q k / sqrt(head size), which "
                    "blend_selector 'query' needs (deviation and prefix_k do not)",
                    *(seen.attended, attend(seen.q, k, v, calls[0].positions)),
                    TOLERANCE.get(k.dtype, 0.0),
                )

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
            what = f"keys of layer {layer} do not turn with their position as is configured"
            allowed = TOLERANCE.get(k.dtype, 0.0)
            self._require_near(what, k, k_there, allowed)
            self._require_near(what, v, v_there, allowed)

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

    def _walk(self, positions: Int64s, by_rows: bool | None = None) -> Tensor:
        calls = self._layers.calls(positions, self._slots, by_rows)
        states: States = self._layers.embed(self._tokens[positions])
        for layer in range(self._layers.num_layers):
            states = self._layers.run(layer, calls, states)
        return self._layers.finish(states)

    def _at(self, positions: Int64s) -> Any:
        return self._cache.at(self._cache.send(self._slots[positions]))

    def _rows(self, positions: Int64s) -> list[tuple[Tensor, Tensor]]:
        at = self._at(positions)
        return [self._cache.read(layer, at) for layer in range(self._layers.num_layers)]

    def _require_same(self, what: str, found: Tensor, wanted: Tensor) -> None:
        """Equal bits, or where kernels may round in another order each time, what that explains."""
        if torch.equal(found, wanted):
            return
        allowed = self._rounding(found.dtype)
        self._require_near(what, found, wanted, allowed)
        log.info("at the start: %s, by rounding only: %s", what, difference(found, wanted, allowed))

    def _require_near(self, what: str, found: Tensor, wanted: Tensor, allowed: float) -> None:
        if not is_near(found, wanted, allowed):
            self._refuse(f"{what}: {difference(found, wanted, allowed)}")

    def _rounding(self, dtype: torch.dtype) -> float:
        """By which results may differ that were rounded in another order, as a part of the largest value.

        A layer adds twice to the states of its tokens, and each sum is rounded, by half of eps at most. Two
        passes whose roundings are independent differ by about the root of all these sums, halves of eps
        each. A third more than that is allowed. In float32 nothing is: both run the same kernels.
        """
        if dtype not in HALVES:
            return 0.0
        return float(torch.finfo(dtype).eps) * sqrt(2 * self._layers.num_layers)

    def _refuse(self, what: str, cause: Exception | None = None) -> NoReturn:
        raise ConfigError(
            f"enable_blending: {self._name} cannot be blended: {what}; set enable_blending to false"
        ) from cause


def _both(states: States) -> Tensor:
    return states.hidden if states.residual is None else torch.stack((states.hidden, states.residual))


def _copy(tensor: Tensor | None) -> Any:
    """Kernels add the residual in place."""
    return None if tensor is None else tensor.clone()


def is_near(found: Tensor, wanted: Tensor, allowed: float) -> bool:
    """Whether all differences are at most `allowed` of the largest value wanted, and none is NaN."""
    return _largest(found, wanted) <= allowed * float(wanted.abs().max())


def difference(found: Tensor, wanted: Tensor, allowed: float) -> str:
    """How far apart two results are, in words."""
    largest = float(wanted.abs().max())
    return (
        f"the largest difference is {_largest(found, wanted):.3g}, {allowed * largest:.3g} are allowed: "
        f"{allowed:.3g} of the largest value, {largest:.3g} ({str(wanted.dtype).removeprefix('torch.')})"
    )


def _largest(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).abs().max())
