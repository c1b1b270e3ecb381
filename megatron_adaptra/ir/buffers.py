"""How the gradients of an iteration are cut into buffers, and what hides their reduction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_adaptra.base.errors import BadInput


@dataclass(frozen=True)
class Buffers:
    """Of one iteration. By default one buffer, which nothing hides.

    Args:
        count: how many are reduced, one by one.
        overlap: seconds from the first to the last one that is ready, while others are reduced; 0
            where each waits for the one before.
        last: bytes of the one that is ready last. Counts where there is an overlap.
        gathers: of shards, all-gathers of a buffer each that follow.
        hides: seconds of each of these but the first that forwards hide.
    """

    count: int = 1
    overlap: float = 0.0
    last: int = 0
    gathers: int = 1
    hides: float = 0.0

    def exposed(self, gather: float) -> float:
        """Seconds that all-gathers of so many seconds each take of an iteration.

        `gather`: of one of them. The next one begins when it has ended, and is hidden by what
        computes before it is waited for.
        """
        return gather + (self.gathers - 1) * max(0.0, gather - self.hides)

    def check(self, nbytes: int) -> None:
        """Check them for gradients of `nbytes` in all.

        Raises:
            BadInput: there are no such buffers.
        """
        for name, seconds in (("overlap", self.overlap), ("gathers that are hidden", self.hides)):
            if not 0 <= seconds < math.inf:
                raise BadInput(f"seconds of {name}", seconds, "at least 0")
        if not 0 <= self.last <= nbytes:
            raise BadInput("last bytes", self.last, f"0 to {nbytes}, which are all")
        for name, value in (("buffers", self.count), ("gathers", self.gathers)):
            if value < 1:
                raise BadInput(name, value, "at least 1")
