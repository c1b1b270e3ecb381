"""Stages beside their own past: which of them got slower than the others did, since when."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median

from megatron_adaptra.diagnose.watch import KEPT_SAMPLES, MostlyWatch, Sight

LOOKED_AT, MOST = 4, 3  # iterations that are looked at, and how many of them have to agree
# Times as long as before, from which on a stage is slow; half of the way back it is well. Cores of
# one machine alone make it 1.45 times for seconds.
SLOW = 1.5


class OwnPast:
    """An OwnPast compares each of so many `stages` with itself in calm iterations.

    Slowness that all stages share is no stage's. `slow`, `well`: see AlikeStages.
    """

    def __init__(self, stages: int) -> None:
        self.slow: dict[int, Sight] = {}
        self.well: dict[int, Sight] = {}
        self._watches = {stage: MostlyWatch(LOOKED_AT, MOST, 1.0) for stage in range(stages)}
        self._calm: list[deque[float]] = [deque(maxlen=KEPT_SAMPLES) for _ in range(stages)]

    def update(
        self, iteration: int, took: Mapping[int, float], more: Callable[[int], float]
    ) -> None:
        """Take an `iteration`; `took`: seconds of a microbatch, by stage.

        `more`: see AlikeStages.
        """
        for stage, seconds in took.items():
            if not self._calm[stage]:
                self._calm[stage].append(seconds)
        times = {stage: seconds / median(self._calm[stage]) for stage, seconds in took.items()}
        row = sorted(times.values())
        common = max(1.0, row[(len(row) - 1) // 2]) if len(row) > 1 else 1.0
        for stage, seconds in took.items():
            least, alone = SLOW * (1 + more(stage)), times[stage] / common
            over = math.sqrt(least)
            self._watches[stage].update(iteration, alone, least, over)
            if alone < over and stage not in self.slow:
                self._calm[stage].append(seconds / common)
        self.slow = {s: watch.slow for s, watch in self._watches.items() if watch.slow}
        self.well = {s: watch.well for s, watch in self._watches.items() if watch.well}
