"""vLLM's own model, called layer by layer for any rows of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context, override_forward_context, set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from lwkv.integrations.vllm.blending.model.attention_hooks import keys_and_values, run_seen
from lwkv.integrations.vllm.blending.model.calls import Call, Seen, States
from lwkv.integrations.vllm.blending.model.flat_layer import FlatLayer, flat_layer
from lwkv.integrations.vllm.blending.model.kernels import EagerKernels
from lwkv.integrations.vllm.blending.model.row_attention import RowAttentions, RowMetadata, is_better
from lwkv.integrations.vllm.blending.model.runs import CallRows, pieces
from lwkv.platforms.protocol import Int64s

MOST_GAP = 1
"""Rows between two runs that are computed with them: vLLM's attention reads the keys anew for each run."""


class ModelLayers:
    """The layers of vLLM's model, called outside its forward pass. For the thread that runs this.

    A call writes the K and V of its rows to their slots with vLLM's own operations, and its attention reads
    the blocks. Work goes to the current stream.

    Args:
        decoder: what has `layers`, `norm` and `embed_input_ids`: a model's `model`.
        names: of the attention layers, in order, one for each of the decoder's.
        spec: vLLM's, of their caches.
        most_rows, most_runs: that one call may have: vLLM has reserved memory for so many.
        send: brings a table to the device, in the order of the current stream, without any waiting.
        row_attentions: for rows that stand far apart; None where vLLM's attention computes them all.
    """

    def __init__(
        self,
        decoder: Any,
        vllm_config: Any,
        names: Sequence[str],
        spec: Any,
        device: torch.device,
        most_rows: int,
        most_runs: int,
        send: Callable[[Int64s], Tensor],
        row_attentions: RowAttentions | None = None,
    ) -> None:
        self.row_attentions = row_attentions
        self.most_gap = MOST_GAP if row_attentions is None else 0
        self._send = send
        self._decoder, self._config, self._names = decoder, vllm_config, names
        self._layers: Sequence[nn.Module] = list(decoder.layers)
        self.num_layers = len(self._layers)
        self._kernels = EagerKernels([*self._layers, decoder.norm], vllm_config)
        self.flat: list[FlatLayer | None] = [flat_layer(layer, vllm_config) for layer in self._layers]
        self.device = device
        known = vllm_config.compilation_config.static_forward_context
        self._attentions: Sequence[nn.Module] = [known[name] for name in names]
        self._block_size = int(spec.block_size)
        self._most_rows, self._most_runs = most_rows, most_runs
        backend = known[names[0]].get_attn_backend()
        # One of its own: vLLM's keeps what its next step needs.
        self._builder = backend.get_builder_cls()(spec, list(names), vllm_config, device)

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """To be in place while layers are called: vLLM's kernels for layers that nobody compiles.

        It is entered for many layers: changing what is in each of them takes the host as long as a kernel.
        """
        by_rows = nullcontext() if self.row_attentions is None else self.row_attentions.in_place()
        with self._kernels.in_place(), by_rows:
            yield

    def embed(self, tokens: Int64s) -> States:
        """The states of `tokens` before the first layer."""
        ids = torch.split(self._send(tokens), self._most_rows)
        return States(torch.cat([self._decoder.embed_input_ids(part) for part in ids]), None)

    def calls(self, positions: Int64s, slots: Int64s, by_rows: bool | None = None) -> list[Call]:
        """Prepare to compute the rows at `positions`, int64 (rows,), ascending, of one sequence.

        Args:
            slots: int64 (tokens,), of the sequence's tokens from its first to the last of the rows at least;
                `block_size` neighbours fill a block in order.
            by_rows: whether `row_attentions` compute them; None: where that is faster.
        """
        cuts = list(pieces(positions, self._most_rows, len(positions)))
        if by_rows is None:
            by_rows = self.row_attentions is not None and any(is_better(cut.ends, cut.first) for cut in cuts)
        if not by_rows:
            cuts = list(pieces(positions, self._most_rows, self._most_runs))
        blocks = slots[:: self._block_size] // self._block_size
        seen = (positions[cut.ends - 1] + 1 for cut in cuts)
        tables = [blocks, *chain.from_iterable(zip(map(_bounds, cuts), seen, strict=True))]
        # Whatever is sent by itself costs the host as much as launching several kernels.
        sent = self._send(np.concatenate([positions, slots[positions], *map(_padded, tables)]))
        rows = sent[: 2 * len(positions)].view(2, -1)
        small = iter(_parts(sent[2 * len(positions) :].int(), [len(table) for table in tables]))
        on_device = next(small)
        make = self._call_by_rows if by_rows else self._call
        return [make(positions, rows, on_device, cut, next(small), next(small)) for cut in cuts]

    def run(self, layer: int, calls: Sequence[Call], states: States) -> States:
        """Compute all rows of a pass in one layer."""
        return _joined([self._run_flat(layer, call, states) for call in calls])

    def run_modules(self, layer: int, calls: Sequence[Call], states: States) -> States:
        """As `run`, by calling the layer's modules, to which something may be hooked."""
        return _joined([self._run(layer, call, states) for call in calls])

    def run_seen(self, layer: int, calls: Sequence[Call], states: States) -> Seen:
        """As `run`; gives also what the layer's attention gets, and what it makes of it."""
        return run_seen(self._attentions[layer], lambda: self.run_modules(layer, calls, states))

    def keys_and_values(self, layer: int, calls: Sequence[Call], states: States) -> tuple[Tensor, Tensor]:
        """K and V that `run` would write for its rows, (rows, kv heads, head size), and nothing behind them.

        The states can be used again.
        """
        # Kernels add the residual in place.
        residual = None if states.residual is None else states.residual.clone()
        own = States(states.hidden.clone(), residual)
        runs = [partial(self._run, layer, call, own) for call in calls]
        return keys_and_values(self._attentions[layer], runs)

    def finish(self, states: States) -> Tensor:
        """What the model's forward pass returns: (rows, hidden)."""
        hidden = self._decoder.norm(states.hidden, states.residual)[0]
        assert isinstance(hidden, Tensor)
        return hidden

    def _run(self, layer: int, call: Call, states: States) -> States:
        residual = None if states.residual is None else states.residual[call.rows]
        with self.forward_context(call):
            # Its kernels write to what they are given, which nobody needs any more.
            return States(*self._layers[layer](call.positions, states.hidden[call.rows], residual))

    def _run_flat(self, layer: int, call: Call, states: States) -> States:
        flat = self.flat[layer]
        if flat is None or states.residual is None:
            return self._run(layer, call, states)
        with self.forward_context(call):
            return States(*flat(call.positions, states.hidden[call.rows], states.residual[call.rows]))

    def forward_context(self, call: Call) -> AbstractContextManager[Any]:
        """vLLM's forward context for the rows of a call, whatever runs in it."""
        context: AbstractContextManager[Any] = override_forward_context(call.context)
        return context

    def _call(
        self, positions: Int64s, rows: Tensor, blocks: Tensor, cut: CallRows, bounds: Tensor, seen: Tensor
    ) -> Call:
        first, last, ends = cut
        on_host = _bounds(cut)
        places, slots = rows[0, first:last], rows[1, first:last]
        common = CommonAttentionMetadata(
            query_start_loc=bounds,
            query_start_loc_cpu=torch.from_numpy(on_host.astype(np.int32)),
            seq_lens=seen,
            num_reqs=len(ends),
            num_actual_tokens=last - first,
            max_query_len=int(np.diff(on_host).max()),
            max_seq_len=int(positions[last - 1]) + 1,
            block_table_tensor=blocks[None].expand(len(ends), -1).contiguous(),
            slot_mapping=slots,
            causal=True,
        )
        # A schedule that FlashAttention makes ahead may be in memory that the next one is made in, too.
        return self._made(cut, places, slots, self._builder.build(0, common, fast_build=True))

    def _call_by_rows(
        self, positions: Int64s, rows: Tensor, blocks: Tensor, cut: CallRows, bounds: Tensor, seen: Tensor
    ) -> Call:
        del positions, bounds, seen
        places, slots = rows[0, cut.first : cut.last], rows[1, cut.first : cut.last]
        return self._made(cut, places, slots, RowMetadata(places, blocks), by_rows=True)

    def _made(
        self, cut: CallRows, positions: Tensor, slots: Tensor, metadata: Any, by_rows: bool = False
    ) -> Call:
        context = set_forward_context(
            dict.fromkeys(self._names, metadata),
            self._config,
            num_tokens=len(positions),
            slot_mapping=dict.fromkeys(self._names, slots),
            skip_compiled=True,
        )
        with context:
            kept = get_forward_context()
        # Experts are known by their names: else each takes the next name of a list, as in a pass over all.
        kept.all_moe_layers = None
        return Call(slice(cut.first, cut.last), positions, kept, by_rows)


def _joined(done: Sequence[States]) -> States:
    """The rows of all calls, in order."""
    if len(done) == 1:
        return done[0]
    hidden, residual = zip(*done, strict=True)
    return States(torch.cat(hidden), torch.cat(residual))


def _bounds(cut: CallRows) -> Int64s:
    """The first row of each run of a call, and the end, counted from the call's first row."""
    bounds: Int64s = np.concatenate([[cut.first], cut.ends]) - cut.first
    return bounds


def _padded(table: Int64s) -> Int64s:
    """With as many zeros as make what follows begin at a multiple of 16 bytes, in int32."""
    return np.pad(table, (0, -len(table) % 4))


def _parts(joined: Tensor, lengths: Sequence[int]) -> Iterator[Tensor]:
    """What was padded and joined, one by one."""
    first = 0
    for length in lengths:
        yield joined[first : first + length]
        first += length + -length % 4
