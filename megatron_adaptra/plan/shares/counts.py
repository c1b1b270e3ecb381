"""Counts of microbatches for each data-parallel replica, by how fast it is.

An iteration takes as long as its slowest replica. A replica at half speed with half of the others'
microbatches is in time; the global batch stays, and `ir/sync.py` has the weights with which the
mean stays exact. Counts are found exactly: no others of at least 1 each have a faster iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.sync import SyncPlan

Cost = Callable[[int], float]  # seconds of so many microbatches; it never falls with their number
SAME = 1e-12  # seconds that differ by less than this share are the same
_NAMED = 6  # replicas of one count that a sentence names


class Speed(NamedTuple):
    """A speed gives the seconds of m microbatches: `outside` + m `per_microbatch`.

    Args:
        per_microbatch: of a pipeline, that of its slowest stage; above 0.
        outside: seconds whatever m is: a pipeline's fill and drain, work before and after.
    """

    per_microbatch: float
    outside: float = 0.0

    def seconds(self, count: int) -> float:
        """Return the seconds of `count` microbatches."""
        return self.outside + count * self.per_microbatch


@dataclass(frozen=True)
class SharePlan:
    """A share plan holds counts, and the seconds of an iteration with them.

    Args:
        sync: the counts.
        seconds: by replica, until it has run its microbatches.
        full: seconds of an iteration in which each replica runs as many as in stock.
        bound: seconds that no counts can beat, not even with parts of microbatches.
        step: seconds of what follows when all replicas are there, the optimizer step.
    """

    sync: SyncPlan
    seconds: tuple[float, ...]
    full: float
    bound: float
    step: float = 0.0

    @property
    def predicted(self) -> float:
        """Seconds of an iteration."""
        return max(self.seconds) + self.step

    @property
    def gain(self) -> float:
        """The ratio of an iteration's seconds in stock to those with these counts."""
        return self.full / self.predicted if self.predicted else 1.0


def share_by_speed(speeds: Sequence[Speed], microbatches: int, step: float = 0.0) -> SharePlan:
    """Return the plan for replicas of such `speeds`.

    Args:
        speeds: by replica.
        microbatches: of a replica in stock.
        step: seconds of what follows when all replicas are there.

    Raises:
        BadInput: no replica, microbatches below 1, or impossible seconds.
    """
    bound = least_seconds(speeds, microbatches)
    costs = [speed.seconds for speed in speeds]
    counts = least_counts(costs, microbatches)
    seconds = tuple(cost(count) for cost, count in zip(costs, counts, strict=True))
    full = max(cost(microbatches) for cost in costs)
    return SharePlan(SyncPlan(microbatches, counts), seconds, full + step, bound + step, step)


def least_counts(
    costs: Sequence[Cost], microbatches: int, start: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Find counts of at least 1, on average `microbatches`, whose greatest cost is the least.

    Of all such counts those with the fewest microbatches away from home; of these, the ones that
    lie closest to each other; of these, the ones that take least, then the first replicas run more.

    One microbatch after the other goes from a replica that takes longest to the one that ends
    first with one more, as long as that one ends earlier than the other did. Then no counts are
    better: with fewer on the slowest replica, another one would have at least one more than now,
    and so take at least as long.

    Args:
        costs: by replica, seconds of so many microbatches; infinite where it cannot run as many.
        microbatches: of a replica in stock.
        start: counts to begin with, which change nothing but how many costs are asked for.

    Raises:
        BadInput: no replica, microbatches below 1, or no such counts to begin with.
    """
    full = SyncPlan.full_of(len(costs), microbatches)
    counts = list(full.counts if start is None else SyncPlan(microbatches, tuple(start)).counts)
    replicas = range(len(counts))
    while True:
        slowest = max(replicas, key=lambda r: (costs[r](counts[r]), -r))
        longest = costs[slowest](counts[slowest])
        others = [r for r in replicas if r != slowest]
        if counts[slowest] == 1 or not others:
            break
        taker = min(others, key=lambda r: (costs[r](counts[r] + 1), r))
        if not _is_less(costs[taker](counts[taker] + 1), longest):
            break
        counts[slowest] -= 1
        counts[taker] += 1
    return _closest(costs, microbatches, longest) or tuple(counts)


def _closest(costs: Sequence[Cost], microbatches: int, most: float) -> tuple[int, ...]:
    """Find counts within `most` seconds that move the fewest microbatches, spread evenly.

    Empty where costs fall with a number although they never should.
    """
    counts = [_room(cost, microbatches, most) for cost in costs]
    for _ in range(len(counts) * microbatches - sum(counts)):
        takers = [
            (count, seconds, replica)
            for replica, (cost, count) in enumerate(zip(costs, counts, strict=True))
            if count >= microbatches and not _is_less(most, seconds := cost(count + 1))
        ]
        if not takers:
            return ()
        counts[min(takers)[2]] += 1
    return tuple(counts)


def _room(cost: Cost, microbatches: int, most: float) -> int:
    """Return how many of its own microbatches a replica has time for, at least 1."""
    low, high = 1, microbatches + 1  # it has time for `low`, and not, or not of its own, for `high`
    while high - low > 1:
        middle = (low + high) // 2
        if _is_less(most, cost(middle)):
            high = middle
        else:
            low = middle
    return low


def least_seconds(speeds: Sequence[Speed], microbatches: int) -> float:
    """Return seconds that no counts of at least 1 can beat, not even with parts of microbatches.

    All replicas of such `speeds` end at one moment T, and have together
    sum((T - outside) / per_microbatch) = len(speeds) x `microbatches`; but none runs less than one.

    Raises:
        BadInput: no replica, or impossible seconds.
    """
    total = SyncPlan.full_of(len(speeds), microbatches).total
    for replica, speed in enumerate(speeds):
        if not 0 < speed.per_microbatch < math.inf:
            allowed = "a finite number of seconds above 0"
            raise BadInput(f"microbatch of replica {replica}", speed.per_microbatch, allowed)
        if not 0 <= speed.outside < math.inf:
            allowed = "a finite number of seconds of at least 0"
            raise BadInput(f"seconds outside of replica {replica}", speed.outside, allowed)
    rate = sum(1 / speed.per_microbatch for speed in speeds)
    spent = sum(speed.outside / speed.per_microbatch for speed in speeds)
    return max((total + spent) / rate, *(speed.seconds(1) for speed in speeds))


def shares_in_words(sync: SyncPlan) -> str:
    """Describe how many microbatches each replica runs, those with the fewest first."""
    if sync.full:
        return f"each replica runs its own {_microbatches(sync.microbatches)}"
    by_count: dict[int, list[int]] = {}
    for replica, count in enumerate(sync.counts):
        by_count.setdefault(count, []).append(replica)
    parts = [
        f"{_replicas(replicas)} {'run' if replicas[1:] else 'runs'} {_microbatches(count)}"
        for count, replicas in sorted(by_count.items())
    ]
    return f"{', '.join(parts)}, instead of {sync.microbatches} each"


def _replicas(replicas: Sequence[int]) -> str:
    if len(replicas) > _NAMED:
        return f"{len(replicas)} replicas"
    names = [str(replica) for replica in replicas]
    if not names[1:]:
        return f"replica {names[0]}"
    return f"replicas {', '.join(names[:-1])} and {names[-1]}"


def _microbatches(count: int) -> str:
    return f"{count} microbatch" + "es" * (count != 1)


def _is_less(one: float, other: float) -> bool:
    """Return whether `one` is less than `other` by more than rounding."""
    return one < other * (1 - SAME)
