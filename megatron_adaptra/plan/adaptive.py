"""Warmup depths that absorb the given link delays at the least activations in flight.

While a message is on its way, the stage that sent it can run further forwards, if its warmup is
deep enough: a round trip of c seconds over a link is hidden by `c / (f + b)` more microbatches of
slack between the two stages (the idea of Adaptra/PipeMorph, section "adaptive warmup"). That closed
form is the start; the simulator judges. Small cases are searched exhaustively.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.model.bounds import lower_bound
from megatron_adaptra.plan.base import planner, warmup_line
from megatron_adaptra.plan.one_f_one_b import stock_warmup
from megatron_adaptra.sim.clock import simulate

Depths = tuple[int, ...]
EXHAUSTIVE_OPS = 40_000  # simulate every choice while that is at most so many ops, about 0.3 s
SAME = 1e-6  # relative difference of two iteration times below which memory decides


@planner("adaptive")
def adaptive(conditions: Conditions, sends: str = "eager") -> Schedule:
    """The fastest warmup depths within the budget, then the shallowest of these.

    Never slower than 1F1B in the simulator where the budget allows 1F1B. Depths never increase
    towards the last stage: a stage cannot wait for a backward that its successor has not begun.
    """
    search = _Search(conditions, sends)
    best = search.exhaustive() if search.is_small() else search.climb()
    count = conditions.microbatches
    order = tuple(warmup_line(d, count) for d in best)
    return Schedule(order, count, policy="adaptive", why=explain(conditions, best))


def explain(conditions: Conditions, depths: Depths) -> str:
    """The plan in one sentence."""
    slow = [
        f"{a}->{b} {1e3 * link.delay:.3g} ms"
        + (f" at {link.bandwidth / 1e6:.3g} MB/s" if math.isfinite(link.bandwidth) else "")
        for (a, b), link in sorted(conditions.links.items())
        if link.delay > 0 or math.isfinite(link.bandwidth)
    ]
    stock = stock_warmup(conditions.stages, conditions.microbatches)
    more = [d - s for d, s in zip(depths, stock, strict=True)]
    if not any(more):
        what = "the warmup of 1F1B is deep enough"
    else:
        what = "warmup " + ",".join(map(str, depths)) + " instead of " + ",".join(map(str, stock))
    return (f"slow links {'; '.join(slow)}: " if slow else "no slow link: ") + what


class _Search:
    def __init__(self, conditions: Conditions, sends: str) -> None:
        self.conditions, self.sends = conditions, sends
        count = conditions.microbatches
        limit = math.inf
        caps = []  # depths do not increase, so a small budget limits the stages after it too
        for budget in conditions.activation_budget:
            limit = min(limit, budget)
            caps.append(int(min(limit, count)))
        self.caps = tuple(caps)
        self.bound = lower_bound(conditions)
        self.seen: dict[Depths, float] = {}

    def seconds(self, depths: Depths) -> float:
        known = self.seen.get(depths)
        if known is None:
            count = self.conditions.microbatches
            schedule = Schedule(tuple(warmup_line(d, count) for d in depths), count)
            known = simulate(lower(schedule), self.conditions, self.sends).makespan
            self.seen[depths] = known
        return known

    def better(self, a: Depths, b: Depths) -> bool:
        """Whether a is faster than b, or as fast with fewer activations in flight."""
        fast_a, fast_b = self.seconds(a), self.seconds(b)
        if abs(fast_a - fast_b) > SAME * fast_b:
            return fast_a < fast_b
        return (sum(a), a) < (sum(b), b)

    def is_small(self) -> bool:
        stages, count = self.conditions.stages, self.conditions.microbatches
        choices = math.comb(max(self.caps) - 1 + stages, stages)
        return choices * 2 * stages * count <= EXHAUSTIVE_OPS

    def exhaustive(self) -> Depths:
        best: Depths | None = None
        for depths in sorted(self.choices(), key=lambda d: (sum(d), d)):
            if best is None or self.better(depths, best):
                best = depths
            if self.seconds(best) <= self.bound * (1 + SAME):
                break  # nothing is faster, and what follows holds more
        assert best is not None
        return best

    def choices(self, stage: int = 0, limit: int | None = None) -> Iterator[Depths]:
        if stage == self.conditions.stages:
            yield ()
            return
        top = self.caps[stage] if limit is None else min(limit, self.caps[stage])
        for depth in range(1, top + 1):
            for rest in self.choices(stage + 1, depth):
                yield (depth, *rest)

    def climb(self) -> Depths:
        """Local search from the closed form, from 1F1B and from all the memory there is."""
        best = min(self.starts(), key=lambda d: (self.seconds(d), sum(d), d))
        step = max(1, self.conditions.microbatches // 4)
        while True:
            moved = True
            while moved:
                moved = False
                for depths in self.moves(best, step):
                    if self.better(depths, best):
                        best, moved = depths, True
                        break
            if step == 1:
                return best
            step = max(1, step // 2)

    def starts(self) -> list[Depths]:
        c = self.conditions
        period = max(
            f + i + w
            for f, i, w in zip(c.forward, c.backward_input, c.backward_weight, strict=True)
        )
        if c.cores is not None:
            work = sum(c.forward) + sum(c.backward_input) + sum(c.backward_weight)
            period = max(period, work / c.cores)
        depths = [1]
        for s in reversed(range(c.stages - 1)):
            trip = c.link(s, s + 1).delay + c.link(s + 1, s).delay
            slack = 1 + (math.ceil(trip / period) if period > 0 else c.microbatches)
            depths.append(depths[-1] + slack)
        closed = tuple(reversed(depths))
        stock = stock_warmup(c.stages, c.microbatches)
        return [self.fit(closed), self.fit(stock), self.caps]

    def fit(self, depths: Depths) -> Depths:
        """The depths cut to the budget; never increasing."""
        out, limit = [], math.inf
        for depth, cap in zip(depths, self.caps, strict=True):
            limit = max(1, min(limit, depth, cap))
            out.append(int(limit))
        return tuple(out)

    def moves(self, depths: Depths, step: int) -> Iterator[Depths]:
        """Shallower first: one stage or a whole end of the pipeline, by `step`."""
        stages = len(depths)
        for first in range(stages):
            for last in range(first, stages):
                if 0 < first and last < stages - 1 and first != last:
                    continue  # inner runs gain nothing that ends and single stages do not
                for delta in (-step, step):
                    moved = list(depths)
                    for s in range(first, last + 1):
                        moved[s] = min(max(1, moved[s] + delta), self.caps[s])
                    if tuple(moved) != depths and all(
                        a >= b for a, b in zip(moved, moved[1:], strict=False)
                    ):
                        yield tuple(moved)
