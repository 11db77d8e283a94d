"""Loads whose keys turn on their way, to the positions at which they are used again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from lwkv.connectors.loader import Load, Loader
from lwkv.connectors.rope import Rope, Turning
from lwkv.connectors.transfer_plan import Slice, TransferPlan
from lwkv.errors import RequestError
from lwkv.kernels import Rows, Turn
from lwkv.layouts.paged_layer import PagedLayer
from lwkv.platforms import Event
from lwkv.platforms.protocol import Int64s
from lwkv.transfer import NO_SLOT, Transfer


@dataclass(slots=True, eq=False)
class TurnedLoad(Load):
    """A load whose keys may turn.

    Attributes:
        rows_of: int64 (tokens,), of each token of the plan's transfer its number among all tokens that the
            load has moved from the beginning; NO_SLOT for one that is not moved.
        turning: what turns keys; None where they stay as they are.
        turn: what turns the keys of the tokens that are left.
        model_is_ahead: whether the model has something to compute before it reads the first layer.
    """

    rows_of: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    turning: Turning | None = None
    turn: Turn | None = None
    model_is_ahead: bool = False

    def send_tables(self) -> None:
        """Have the tables of the rows that are left on the device by the time that kernels get there."""
        rows = self.rows_left()
        self.turn = self.turning.of(rows) if len(rows) and self.turning is not None else None

    def rows_left(self) -> Int64s:
        rows: Int64s = self.rows_of[self.rows_of != NO_SLOT]
        return rows

    def arrival(self, piece: Slice) -> Rows:
        """How a slice's rows come to where they are loaded to."""
        return piece.rows

    def turn_of(self, piece: Slice) -> Turn | None:
        """What turns a slice's keys."""
        if self.turn is None:
            return None
        return self.turn._replace(angle_of=self.turn.angle_of[piece.first_row : piece.last_row])


TurnedT = TypeVar("TurnedT", bound=TurnedLoad)


class TurningLoader(Loader[TurnedT]):
    """What the loaders of such loads have in common.

    Attributes:
        rope: how the model turns its keys; needed before a load that moves keys to other positions.
    """

    rope: Rope | None = None

    def drop_chunks(self, load: TurnedT, kept: npt.NDArray[np.bool_]) -> None:
        load.rows_of = load.rows_of[np.repeat(kept, load.plan.transfer.chunk_tokens)]
        super().drop_chunks(load, kept)
        load.send_tables()

    def _scatter(
        self, load: TurnedT, targets: Sequence[PagedLayer], staging: torch.Tensor, piece: Slice
    ) -> None:
        staged = load.plan.staged(targets, staging, load.arrival(piece))
        load.lane.move(staged._replace(turn=load.turn_of(piece)))

    def _turning(self, plan: TransferPlan, shift: Int64s | None) -> Turning | None:
        """What turns keys by `shift`. Raises RequestError as `begin_load`."""
        if shift is None:
            return None
        moved = plan.transfer.slots != NO_SLOT
        if self.rope is None:
            raise RequestError("keys are to move to other positions: call set_rope first")
        if len(shift) != len(moved):
            raise RequestError(f"shift has {len(shift)} entries, the transfer has {len(moved)} tokens")
        return Turning(self.rope, shift[moved], plan.uploads) if moved.any() else None


class InPlaceLoader(TurningLoader[TurnedLoad]):
    """Loads straight into the engine's blocks, with keys that turn on their way."""

    def begin_load(
        self,
        transfer: Transfer,
        pages: Int64s | None = None,
        shift: Int64s | None = None,
        behind: Event | None = None,
    ) -> TurnedLoad:
        """As Loader's; `shift`, int64 (tokens,), is each token's new position less its stored one.

        Args:
            behind: what the load writes comes behind this event, recorded by now, and not behind what the
                current stream holds when the first layer is queued. For a model that computes ahead.

        Raises:
            RequestError: `shift` without a rope, or of another length than the transfer's slots.
        """
        plan = self._plans.make(transfer, self.lane.kernels, pages)
        load = TurnedLoad(
            self.lane,
            plan,
            [None] * self._num_layers,
            rows_of=rows_of(transfer),
            turning=self._turning(plan, shift),
        )
        load.send_tables()
        if pages is not None:
            self._fill_ahead(load, pages)
        if behind is not None:
            load.is_ordered = load.model_is_ahead = True
            self._wait_behind(load, behind)
        return load

    def layers_ahead(self, load: TurnedLoad, layer: int, known: bool) -> int:
        # Where the model computes ahead, it is not kept waiting by what is queued meanwhile.
        return super().layers_ahead(load, layer + load.model_is_ahead, known)

    def _wait_behind(self, load: TurnedLoad, behind: Event) -> None:
        self._platform.wait_event(load.lane.kernels, behind)


def rows_of(transfer: Transfer) -> Int64s:
    """Number the tokens that are moved: int64 (tokens,), NO_SLOT for the others."""
    moved = transfer.slots != NO_SLOT
    return np.where(moved, np.cumsum(moved) - 1, NO_SLOT)
