"""The search for routes: which units a worker gives away, and by which rules workers run theirs.

It counts ops, so that every machine finds the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from random import Random

from megatron_adaptra.base.units import ten_digits
from megatron_adaptra.plan.pipeline.search.search_budget import late
from megatron_adaptra.plan.routes.list_schedule import Made, Rule, Runs, Workers, list_schedule

UNIFORM = tuple(
    Rule(forward, weight, first)
    for first, forward, weight in product((False, True), (1.0, 0.0), (1.0, 0.0))
)
RULES = UNIFORM + tuple(rule._replace(in_turn=True) for rule in UNIFORM)
KEPT = 2  # of the uniform rules, with which further routes are tried
CUT = 0.25  # the average cost of a list schedule that is cut short, as a share of a whole one's
THRESHOLD = 1.0  # seconds that may be lost at the start of an annealing, in seconds of an op
TRANSFERRED = 5  # microbatches that go to another kind of worker at most, in one step
HOMING = 0.2  # of the ops of a search, for bringing microbatches home
CAPS = (0, 1, 2, 4, 8)  # microbatches in flight beyond 1F1B's that are tried for less memory


class RouteSearch:
    """A route search tries routes and keeps the best; of equals, the first.

    Args:
        workers: the job.
        ops: how many ops it may schedule.
        end: of the search by the clock; see `search_budget.end_of`.
    """

    def __init__(self, workers: Workers, ops: int, end: float) -> None:
        self.workers, self.end, self.left, self.ops = workers, end, float(ops), ops
        self.rules = [[rule] * workers.workers for rule in UNIFORM]
        self.random = Random(0)
        work = sum(workers.forward) + sum(workers.backward) + sum(workers.weight)
        self.unit = work / workers.workers / (3 if workers.split else 2)  # seconds of an op

    @property
    def spent(self) -> bool:
        """True where no ops are left, or the time is over."""
        return self.left <= 0 or late(self.end)

    def best_rule(self, runs: Runs) -> Found:
        """Return the routes with the best uniform rule; from then on try the best few alone."""
        tried = []
        for rules in self.rules:
            made = self._schedule(runs, rules, self.workers.turns)
            assert made is not None
            tried.append(Found(runs, rules, self.workers.turns, made))
            if self.spent:
                break
        tried.sort(key=lambda one: one.rank)
        self.rules = [one.rules for one in tried[:KEPT]]
        return tried[0]

    def try_runs(self, runs: Runs, best: Found) -> Found:
        """Return the better of `best` and these `runs` under the rules that are still tried."""
        for rules in self.rules:
            if self.spent:
                break
            made = self._schedule(runs, rules, best.turns, best.made.seconds + self.workers.eps)
            if made is not None:
                found = Found(runs, rules, best.turns, made)
                best = min(best, found, key=lambda one: one.rank)
        return best

    def anneal(self, best: Found, bound: float) -> Found:
        """Change single routes, rules and turns of the best at random, down to `bound` seconds.

        At first results that are a little slower are kept, too (threshold accepting: Dueck and
        Scheuer, Journal of Computational Physics 90, 1990).
        """
        jobs = self.workers
        now, left = best, self.left
        while not self.spent and best.made.seconds > bound + jobs.eps:
            slack = THRESHOLD * self.unit * max(0.0, self.left / left - 0.1)
            changed = self._changed(now)
            made = self._schedule(*changed, now.made.seconds + slack + jobs.eps)
            if made is not None:
                now = Found(*changed, made)
                if now.rank < best.rank:
                    best = now
        return best

    def bring_home(self, best: Found, home: Runs) -> Found:
        """Bring microbatches home where that costs no time: chance has moved some for nothing.

        One alone goes home, or two from each other's workers. It gets HOMING more of the ops.

        Args:
            best: routes that a search has found.
            home: each microbatch on the worker of its home.
        """
        self.left = max(self.left, 0.0) + HOMING * self.ops
        improved = True
        while improved and not self.spent:
            improved = False
            for stage, line in enumerate(home):
                away = [u for u, worker in enumerate(best.runs[stage]) if worker != line[u]]
                for one, other in _returns(best.runs[stage], line, away):
                    if best.runs[stage][one] == line[one] or self.spent:
                        continue
                    changed = list(best.runs[stage])
                    changed[one], changed[other] = line[one], line[other]
                    runs = [*best.runs[:stage], changed, *best.runs[stage + 1 :]]
                    limit = best.made.seconds + self.workers.eps
                    made = self._schedule(runs, best.rules, best.turns, limit)
                    if made is not None:
                        best, improved = Found(runs, best.rules, best.turns, made), True
        return best

    def least_memory(self, best: Found) -> Found:
        """Return the same routes with as few microbatches in flight as take no longer."""
        stages = self.workers.stages
        for cap in CAPS:
            rules = [
                rule._replace(in_flight=min(rule.in_flight, float(stages - w % stages + cap)))
                for w, rule in enumerate(best.rules)
            ]
            made = self._schedule(
                best.runs, rules, best.turns, best.made.seconds + self.workers.eps
            )
            if made is not None:
                return Found(best.runs, rules, best.turns, made)
        return best

    def _schedule(
        self, runs: Runs, rules: list[Rule], turns: list[int], limit: float = math.inf
    ) -> Made | None:
        made = list_schedule(self.workers, runs, rules, turns, limit)
        self.left -= self.workers.ops if made is not None else CUT * self.workers.ops
        return made

    def _changed(self, found: Found) -> tuple[Runs, list[Rule], list[int]]:
        """Change one thing at random: a worker's rule, a unit's turn or worker, or swap two."""
        random, jobs = self.random, self.workers
        runs, rules, turns = found.runs, found.rules, found.turns
        what, unit, other = random.random(), *(random.randrange(jobs.units) for _ in range(2))
        if what < 0.25:
            rules = list(rules)
            worker = random.randrange(jobs.workers)
            rules[worker] = random.choice(RULES)
        elif what < 0.5:
            turns = list(turns)
            turns.insert(other, turns.pop(unit))
        else:
            stage = random.randrange(jobs.stages)
            line = list(runs[stage])
            if what < 0.75:
                line[unit] = random.choice(jobs.conditions.alive(stage))
            else:
                line[unit], line[other] = line[other], line[unit]
            runs = [*runs[:stage], line, *runs[stage + 1 :]]
        return runs, rules, turns


class Found:
    """A result holds routes, rules, and the list schedule that they lead to.

    Args:
        runs: per stage and unit, the worker that runs it.
        rules: per worker.
        turns: units in the order in which they are preferred.
        made: the list schedule.
    """

    def __init__(self, runs: Runs, rules: list[Rule], turns: list[int], made: Made) -> None:
        self.runs, self.rules, self.turns, self.made = runs, rules, turns, made
        # Results with equal times rank by the sum of the moments when their workers end.
        self.rank = ten_digits(made.seconds), ten_digits(sum(made.ends))


def _returns(
    runs: Sequence[int], home: Sequence[int], away: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield the pairs of a stage's units `away` that run on each other's home workers.

    Then yield each alone, as a pair with itself.
    """
    for one in away:
        for other in away:
            if runs[one] == home[other] and runs[other] == home[one]:
                yield one, other
    for one in away:
        yield one, one


def transfers(
    shares: Sequence[int], kinds: Sequence[object], ends: Sequence[float]
) -> Iterator[list[int]]:
    """Yield shares with some microbatches moved from workers of one kind to those of another.

    Args:
        shares: per worker.
        kinds: per worker; those of one kind are alike, and those of None get nothing.
        ends: per worker, when it is done: of equals the last gives, the first gets.
    """
    groups: dict[object, list[int]] = {}
    for i, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(i)
    for giving, getting in product(groups.values(), repeat=2):
        if getting is groups.get(None) or (giving is getting and len(giving) < 2):
            continue
        changed = list(shares)
        for _ in range(TRANSFERRED):
            a = max(giving, key=lambda i: (changed[i], ends[i], -i))
            b = min((i for i in getting if i != a), key=lambda i: (changed[i], ends[i], i))
            if not changed[a]:
                break
            changed[a] -= 1
            changed[b] += 1
            yield list(changed)
