"""Stages that run the same layers, compared: one may have been slow from the start."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_adaptra.diagnose.watch import SlowOnes

LOOKED_AT, MOST = 8, 6  # iterations that are looked at, and how many of them have to agree
# Times as long as others. Clocks, caches and what is next to a rank make alike stages differ by a
# tenth; a stage that was called slow is well again only clearly below that.
SLOW = 1.4


class AlikeStages(SlowOnes):
    """An AlikeStages compares each of so many `stages` with others of the same layers.

    First and last are not called slow: they have an embedding and a loss besides, and prove nothing
    by being slow. A stage that takes clearly longer than they do is slow for certain.
    """

    def __init__(self, stages: int) -> None:
        super().__init__(LOOKED_AT, MOST)
        self._inner = range(1, stages - 1)

    def update(
        self, iteration: int, took: Mapping[int, float], layers: Mapping[int, str],
        more: Callable[[int], float],
    ) -> None:  # fmt: skip
        """Take an `iteration`.

        `took`: seconds of a microbatch, by stage. `layers`: by stage, see StageReport. `more`:
        returns what ops of a stage wait for cores beyond what is normal, see Queue: those that
        share caches compute longer, too.
        """
        times: dict[int, float] = {}
        for stage in self._inner:
            same = [s for s in took if s != stage and layers[s] and layers[s] == layers.get(stage)]
            others = sorted(took[s] for s in same)
            usual = others[len(others) // 2] if others else 0.0  # of two the slower one
            if usual > 0 and took.get(stage, 0.0) > 0:
                times[stage] = took[stage] / usual
        self._follow(iteration, times, lambda stage: SLOW * (1 + more(stage)))
