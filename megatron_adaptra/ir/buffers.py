"""How the gradients of an iteration are cut into buffers, and what hides their reduction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_adaptra.base.errors import BadInput


@dataclass(frozen=True)
class Buffers:
    """A Buffers describes the gradient buffers of an iteration; by default one, with no overlap.

    Args:
        count: how many there are; they are reduced one after another.
        overlap: seconds from when the first buffer is ready until the last one is, in which the
            others are reduced; 0 where each waits for the one before.
        last: bytes of the buffer that is ready last; used only where `overlap` is above 0.
        gathers: how many all-gathers of shards follow, each of one buffer.
        hides: seconds of each all-gather, except the first, that forwards hide.
    """

    count: int = 1
    overlap: float = 0.0
    last: int = 0
    gathers: int = 1
    hides: float = 0.0

    def exposed(self, gather: float) -> float:
        """Return the seconds by which the all-gathers lengthen an iteration.

        `gather`: seconds of one. Each begins when the one before has ended, and is hidden by the
        computation that runs until its result is needed.
        """
        return gather + (self.gathers - 1) * max(0.0, gather - self.hides)

    def check(self, nbytes: int) -> None:
        """Check them for gradients of `nbytes` in all.

        Raises:
            BadInput: a value is out of range.
        """
        for name, seconds in (("overlap", self.overlap), ("gathers that are hidden", self.hides)):
            if not 0 <= seconds < math.inf:
                raise BadInput(f"seconds of {name}", seconds, "at least 0")
        if not 0 <= self.last <= nbytes:
            raise BadInput("last bytes", self.last, f"0 to {nbytes}, which are all")
        for name, value in (("buffers", self.count), ("gathers", self.gathers)):
            if value < 1:
                raise BadInput(name, value, "at least 1")
