"""GPUs that wait for their hosts: these launch too late."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from megatron_adaptra.measure.report import StageReport

STARVED_ITERATIONS = 5  # whose median counts
STARVED_SHARE = 0.1  # of an iteration


class Starvation:
    """A check finds which of so many `stages` has a GPU that waits most for its late host.

    No schedule helps against that.
    """

    def __init__(self, stages: int) -> None:
        self._shares: list[deque[float]] = [deque(maxlen=STARVED_ITERATIONS) for _ in range(stages)]
        self._reported = False

    def update(self, reports: Sequence[StageReport], seconds: float) -> str:
        """Take an iteration's `reports`, one per stage; return a line to log, once, else "".

        `seconds`: those that an iteration takes.
        """
        for shares, report in zip(self._shares, reports, strict=True):
            shares.append(report.starved / seconds)
        typical = [median(shares) for shares in self._shares]
        worst = max(range(len(typical)), key=typical.__getitem__)
        few = len(self._shares[0]) < STARVED_ITERATIONS
        if self._reported or few or typical[worst] < STARVED_SHARE:
            return ""
        self._reported = True
        return (
            f"the GPU of stage {worst} has nothing to do for {typical[worst]:.0%} of an iteration "
            "because its host launches too late; no schedule helps against that"
        )
