"""What the parts find."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Findings:
    """What one part found: plain values, which go to JSON as they are. Times in ms, speeds in GB/s (1e9)."""

    @abstractmethod
    def lines(self, absolute: bool) -> Iterator[str]:
        """Tell it to a reader; without `absolute` only what means something where the host is the device."""

    def faults(self) -> Iterator[str]:
        """What is wrong with lwkv itself, one sentence each: not a slow figure but a wrong byte."""
        yield from ()


@dataclass(frozen=True)
class Absent(Findings):
    """Why there is nothing to find."""

    absent: str

    def lines(self, absolute: bool) -> Iterator[str]:
        yield self.absent


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns under their heads: the first to the left, the others to the right."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for first, *rest in lines:
        cells = [f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True)]
        yield "  ".join([f"{first:{widths[0]}}", *cells]).rstrip()
