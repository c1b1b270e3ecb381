"""Stages beside their own past: which of them got slower than the others did, since when."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median

from megatron_adaptra.diagnose.watch import KEPT_SAMPLES, SLOW, SlowOnes


class OwnPast(SlowOnes):
    """An OwnPast compares each of so many `stages` with itself in calm iterations.

    Slowness that all stages share is no stage's.
    """

    def __init__(self, stages: int) -> None:
        super().__init__()
        self._calm: list[deque[float]] = [deque(maxlen=KEPT_SAMPLES) for _ in range(stages)]

    def update(
        self, iteration: int, took: Mapping[int, float], more: Callable[[int], float]
    ) -> None:
        """Take an `iteration`.

        `took`: seconds of a microbatch, by stage. `more`: see AlikeStages.
        """
        for stage, seconds in took.items():
            if not self._calm[stage]:
                self._calm[stage].append(seconds)
        times = {stage: seconds / median(self._calm[stage]) for stage, seconds in took.items()}
        row = sorted(times.values())
        common = max(1.0, row[(len(row) - 1) // 2]) if len(row) > 1 else 1.0
        for stage, seconds in took.items():
            well = times[stage] / common < math.sqrt(SLOW * (1 + more(stage)))
            if well and stage not in self.slow:
                self._calm[stage].append(seconds / common)
        alone = {stage: one / common for stage, one in times.items()}
        self._follow(iteration, alone, lambda stage: SLOW * (1 + more(stage)))
