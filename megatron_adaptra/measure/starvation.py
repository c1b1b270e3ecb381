"""Stages whose GPU has nothing to do because its host is late: no schedule helps against that."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from megatron_adaptra.measure.report import StageReport

WINDOW = 5  # iterations whose median counts
MUCH = 0.1  # of an iteration


class Starvation:
    """A check finds which of so many `stages` of a pipeline waits most for its host."""

    def __init__(self, stages: int) -> None:
        self._shares: list[deque[float]] = [deque(maxlen=WINDOW) for _ in range(stages)]
        self._reported = False

    def update(self, reports: Sequence[StageReport], seconds: float) -> str:
        """Take an iteration's `reports`, one per stage; return a line to log, once, else "".

        `seconds`: those that an iteration takes.
        """
        for shares, report in zip(self._shares, reports, strict=True):
            shares.append(report.starved / seconds)
        typical = [median(shares) for shares in self._shares]
        worst = max(range(len(typical)), key=typical.__getitem__)
        if self._reported or len(self._shares[0]) < WINDOW or typical[worst] < MUCH:
            return ""
        self._reported = True
        return (
            f"the GPU of stage {worst} has nothing to do for {typical[worst]:.0%} of an iteration "
            "because its host launches too late; no schedule helps against that"
        )
