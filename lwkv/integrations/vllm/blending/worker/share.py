"""How many of the reused tokens a blend in vLLM computes again: as many as hide behind its loading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lwkv.blend.forward.rows import PromptReuse
from lwkv.blend.share.batch_shares import Shares, timed
from lwkv.blend.share.controller import BatchWork, Reason
from lwkv.blend.share.pace import Pace


@dataclass(slots=True)
class TimedBlend:
    """A blend whose share was chosen, and what takes its time."""

    share: float
    work: BatchWork
    pace: Pace


class ControlledShare:
    """Asks lwkv's controller for each blend. For the thread that runs the forward pass.

    Loading holds up the step anyway, so what hides behind it delays nobody. A blend never computes more rows
    than a step may, but for the configured share, which the scheduler has planned with.

    Args:
        shares: with a controller, whose minimum is the configured share.
        full_layers: of `num_layers`, those in which all reused tokens are computed.
        most_rows: that a step may compute, in every layer.
    """

    def __init__(self, shares: Shares, num_layers: int, full_layers: int, most_rows: int) -> None:
        self._shares = shares
        self._num_layers, self._full_layers, self._most_rows = num_layers, full_layers, most_rows

    def choose(self, reuse: PromptReuse, least: float) -> TimedBlend:
        """The share for a prompt that has something to reuse, `least` or more."""
        reused = len(reuse.candidates)
        work = BatchWork(
            reused=reused,
            loaded=reused + reuse.known - reuse.prompt.num_local,
            always=len(reuse.always),
            num_layers=self._num_layers,
            full_layers=self._full_layers,
        )
        decision = self._shares.choose(work)
        # That computing is cheaper than loading comes too late: the scheduler has planned with the blend.
        share = least if decision.reason is Reason.PREFILL else decision.share
        return TimedBlend(max(min(share, self._most_share(work)), least), work, self._shares.new_pace())

    def timed(self, blend: TimedBlend, wait: Callable[[int], None]) -> Callable[[int], None]:
        """`wait`, with its beginning and its end noted."""
        return timed(wait, blend.pace)

    def note(self, blend: TimedBlend, row_layers: int) -> None:
        """Learn of a blend that has computed so many rows, summed over the layers, and loaded all."""
        self._shares.note(blend.work, row_layers, blend.pace)

    def _most_share(self, work: BatchWork) -> float:
        rest = self._most_rows * work.num_layers - work.rows(0.0)
        return rest / (work.reused * max(work.num_layers - work.full_layers, 1))
