"""The search for warmup depths: all choices where they are few, else from several starts.

The landscape has plateaus, as the slowest round trip decides, and two stages may have to change
together to leave one. Random search over thousands of conditions shaped the moves and the starts
(tests/unit/plan compares the result with brute force and with annealing).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.model.bounds import lower_bound
from megatron_adaptra.plan.pipeline.fixed import stock_warmup
from megatron_adaptra.plan.pipeline.search.search_budget import late
from megatron_adaptra.sim.warmup import WarmupClock

Depths = tuple[int, ...]
Rank = tuple[int, int, Depths]
SAME = 1e-9  # relative difference of two iteration times below which memory decides
EXHAUSTIVE_OPS = 270_000  # every choice is timed while that is at most so many ops, about 40 ms
SEARCH_OPS = 8_000_000  # a local search times at most so many ops, about 1 s, ...
SEARCH_CHOICES = 500, 2_000  # ... but no fewer and no more choices than these


class DepthSearch:
    """A depth search finds the fastest warmup depths within the budget, the shallowest of these.

    `sends`: "eager" or "rendezvous". `delta`: forwards by which a depth changes. `end`: of the
    search, on the monotonic clock.
    """

    def __init__(self, conditions: Conditions, sends: str, end: float = math.inf) -> None:
        self.end = end
        # The bound of what these schedules can do: full backwards of a single chunk.
        conditions = replace(conditions, chunks=1, split=False, recompute=False)
        self.conditions, self.clock = conditions, WarmupClock(conditions, sends)
        caps, limit = [], conditions.microbatches
        for budget in conditions.activation_budget:
            # Depths do not increase, so a small budget limits the stages after it too.
            limit = int(min(limit, budget))
            caps.append(limit)
        self.caps = tuple(caps)
        self.quantum = SAME * lower_bound(conditions) or 1.0
        self.fastest = self.quanta(lower_bound(conditions))
        self.ranks: dict[Depths, Rank] = {}
        ops = 2 * conditions.stages * conditions.microbatches * self.clock.cost_factor
        self.small = count_choices(self.caps) * ops <= EXHAUSTIVE_OPS
        least, most = SEARCH_CHOICES
        self.limit = max(least, min(most, SEARCH_OPS // ops))

    def run(self) -> Depths:
        """Try every choice where there are few; else search locally."""
        return self.exhaustive() if self.small else self.climb()

    def quanta(self, seconds: float) -> int:
        """Round `seconds` to units below which they do not count: ranks get a total order."""
        return round(seconds / self.quantum)

    def rank(self, depths: Depths) -> Rank:
        """Return the sort key of `depths`, the least is best: time, then activations in flight."""
        known = self.ranks.get(depths)
        if known is None:
            known = self.quanta(self.clock.seconds(depths)), sum(depths), depths
            self.ranks[depths] = known
        return known

    def improves(self, depths: Depths, best: Depths) -> bool:
        """Return whether `depths` rank before `best`; time them only if they might."""
        if (self.fastest, sum(depths), depths) >= self.rank(best):
            return False  # not even at the lower bound, so it need not be timed
        return self.rank(depths) < self.rank(best)

    def exhaustive(self) -> Depths:
        """Return the best of all choices."""
        shallow_first = sorted(choices(self.caps), key=lambda depths: (sum(depths), depths))
        best = shallow_first[0]
        for depths in shallow_first:
            if self.improves(depths, best):
                best = depths
            if self.rank(best)[0] <= self.fastest:
                break  # nothing is faster, and what follows holds more
        return best

    def climb(self) -> Depths:
        """Descend from every start; then search further around the best result."""
        best, starts = self.caps, self.starts()
        if late(self.end):  # the closed form, as it is
            shares = spread(slack_to_hide(self.conditions), self.caps, 1.0)
            return self.fit(int(depth + 0.5) for depth in shares)
        if self.end < math.inf:  # those that there is time for
            starts = [start for start in starts if not late(self.end) and self.rank(start)]
        for start in sorted(starts, key=self.rank):
            best = min(best, self.descend(start), key=self.rank)
            if self.rank(best)[0] <= self.fastest or self.spent:
                break
        wider: Depths | None = best
        while wider is not None:
            best = self.descend(wider, step=1)
            wider = next((d for d in self.wider(best) if self.improves(d, best)), None)
        return best

    @property
    def spent(self) -> bool:
        """True where as many choices have been timed as allowed, or the time is over."""
        return len(self.ranks) >= self.limit or late(self.end)

    def descend(self, best: Depths, step: int | None = None) -> Depths:
        """Improve `best` by moves of `step` while they help, then of half of it, down to 1."""
        step = max(1, self.conditions.microbatches // 4) if step is None else step
        while step and not self.spent:
            before = best
            for first, last in self.runs():
                if late(self.end):
                    return best
                for delta in (-step, step):
                    moved = self.moved(best, first, last, delta)
                    while self.improves(moved, best) and not self.spent:
                        best, moved = moved, self.moved(moved, first, last, delta)
            if best == before:
                step //= 2
        return best

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield first and last of the stages that one step moves: one, or all up to an end."""
        last = self.conditions.stages - 1
        for s in range(last + 1):
            yield 0, s
        for s in range(1, last + 1):
            yield s, s
            if s < last:
                yield s, last

    def moved(self, depths: Depths, first: int, last: int, delta: int) -> Depths:
        """Return `depths` with those of the stages `first` to `last` changed by `delta`.

        They change as far as the budget and the neighbours allow.
        """
        out = list(depths)
        low = depths[last + 1] if last + 1 < len(depths) else 1
        high = depths[first - 1] if first else self.caps[0]
        for s in range(first, last + 1):
            out[s] = min(max(low, depths[s] + delta), high, self.caps[s])
        return tuple(out)

    def wider(self, best: Depths) -> Iterator[Depths]:
        """Yield `best` with one step of any run of stages, or of any two, each up or down."""
        stages = range(len(best))
        for first in stages:
            for last in stages[first + 1 :]:
                if late(self.end):
                    return
                for delta in (-1, 1):
                    run = self.moved(best, first, last, delta)
                    yield run
                    for other in (-1, 1):
                        one = self.moved(best, first, first, delta)
                        yield self.moved(one, last, last, other)
                if self.spent:
                    return

    def starts(self) -> list[Depths]:
        """Return the starts: the closed form, 1F1B, all the memory, and fair shares of it."""
        c = self.conditions
        slack, unlimited = slack_to_hide(c), (math.inf,) * c.stages
        profiles = [
            spread(slack, unlimited, 1.0),
            spread(slack, self.caps, 1.0),
            spread([1.0] * len(slack), self.caps, math.inf),
        ]
        starts = [self.caps, self.fit(stock_warmup(c.stages, c.microbatches))]
        for profile in profiles:
            # Half a microbatch does not exist: rounded down, to the nearest, up.
            starts += [self.fit(int(d + up) for d in profile) for up in (1e-6, 0.5, 1 - 1e-6)]
        return list(dict.fromkeys(starts))

    def fit(self, depths: Iterable[int]) -> Depths:
        """Cut the `depths`, one per stage, to the budget, so that they never increase."""
        out, limit = [], self.caps[0]
        for depth, cap in zip(depths, self.caps, strict=True):
            limit = max(1, min(limit, depth, cap))
            out.append(limit)
        return tuple(out)


def slack_to_hide(c: Conditions) -> list[float]:
    """Return, per link, the slack that hides its round trip: 1, and one more per period of it.

    Slack is the difference of the warmup depths of the two stages, in microbatches.
    """
    period, slack = c.microbatch_seconds, []
    for s in range(c.stages - 1):
        trip = c.message_seconds(s, s + 1) + c.message_seconds(s + 1, s)
        slack.append(1 + min(trip / period if period else trip and math.inf, c.microbatches))
    return slack


def spread(slack: list[float], caps: Sequence[float], steepest: float) -> list[float]:
    """Return depths, 1 on the last stage, that rise in proportion to `slack`, up to `caps`.

    `slack` is per link, `caps` per stage, in microbatches. Depths rise by up to `steepest` times
    the slack; where a cap is in the way, every link below it takes the same smaller share.
    """
    along = [0.0]  # slack between the last stage and each stage, from the last stage up
    for share in reversed(slack):
        along.append(along[-1] + share)
    above = list(reversed(caps))
    depths, at = [1.0], 0
    while at + 1 < len(above):
        slopes = [
            (above[s] - depths[at]) / (along[s] - along[at]) for s in range(at + 1, len(above))
        ]
        slope = min(slopes)
        end = len(above) - 1 - slopes[::-1].index(slope) if slope < steepest else len(above) - 1
        slope, base = min(slope, steepest), depths[at]
        depths += [base + slope * (along[s] - along[at]) for s in range(at + 1, end + 1)]
        at = end
    return depths[::-1]


def count_choices(caps: Depths) -> int:
    """Count the depths that never increase and keep to the caps."""
    ways = [1] * caps[-1]  # per depth of the first stage of an end of the pipeline, less 1
    for cap in reversed(caps[:-1]):
        deep = len(ways)
        sums = list(accumulate(ways))
        ways = [sums[min(d, deep - 1)] for d in range(cap)]
    return sum(ways)


def choices(caps: Depths) -> Iterator[Depths]:
    """Yield all depths that never increase and keep to the caps."""
    ends: list[Depths] = [()]
    for cap in reversed(caps):
        ends = [(depth, *end) for end in ends for depth in range(end[0] if end else 1, cap + 1)]
    yield from ends
