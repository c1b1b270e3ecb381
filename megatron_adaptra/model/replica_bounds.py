"""How fast several replicas can be at best, whatever their routes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heapify, heapreplace

from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.replicas import ReplicaConditions


def replica_bound(conditions: ReplicaConditions) -> float:
    """Seconds that no schedule beats, with any routes, within the activation budgets.

    Every stage has to run all microbatches of all replicas, each on one of its workers. A worker
    that runs q of them starts once the first can be there, and runs all their ops. Before its first
    backward it runs no more forwards than it has room for, while that microbatch passes the later
    stages; after its last one that microbatch has to pass the earlier stages. The stage is done no
    sooner than with the numbers q for which the last worker is done first. And where workers share
    cores, these have to compute all of it, each microbatch where that takes the least.
    """
    c = conditions
    times = _Times(c)
    count = c.replicas * c.microbatches
    done = 0.0
    for stage in range(c.stages):
        workers = c.alive(stage)
        shares = even_shares([partial(times.least, w) for w in workers], count)
        done = max(done, *(times.least(w, q) for w, q in zip(workers, shares, strict=True) if q))
    if c.cores is not None and c.shared:
        done = max(done, count * times.computed / c.cores)
    return done + c.pipeline.step_seconds


class _Times:
    """A _Times holds seconds before, between and after a worker's ops on the quickest others."""

    def __init__(self, conditions: ReplicaConditions) -> None:
        c = self.conditions = conditions
        self.split = c.pipeline.split
        whole = c.pipeline.backward
        self.forward = [c.seconds(Kind.F, w) for w in range(c.workers)]
        halves = [c.seconds(Kind.I, w) + c.seconds(Kind.W, w) for w in range(c.workers)]
        pieces = [c.seconds(Kind.B, w) for w in range(c.workers)]
        self.early = [c.seconds(Kind.I, w) for w in range(c.workers)] if self.split else pieces
        self.backward = [min(a, b) for a, b in zip(halves, pieces, strict=True)]
        if self.split and whole:  # a backward in one piece may end before its two halves
            self.early = [min(a, b) for a, b in zip(self.early, pieces, strict=True)]
        elif not self.split:
            self.backward = pieces
        self.head, self.trip, self.home = ([0.0] * c.workers for _ in range(3))
        last = c.stages - 1
        for stage in range(1, c.stages):
            for w in c.alive(stage):
                self.head[w] = min(
                    self.head[a] + self.forward[a] + c.message_seconds(a, w)
                    for a in c.alive(stage - 1)
                )
                self.home[w] = min(
                    c.message_seconds(w, a) + self.early[a] + self.home[a]
                    for a in c.alive(stage - 1)
                )
        for stage in range(last - 1, -1, -1):
            for w in c.alive(stage):
                self.trip[w] = min(
                    c.message_seconds(w, b) + self.forward[b] + self.trip[b] + self.early[b]
                    + c.message_seconds(b, w)
                    for b in c.alive(stage + 1)
                )  # fmt: skip

    @property
    def computed(self) -> float:
        """Seconds of a core that one microbatch takes at least, on all stages."""
        c = self.conditions
        each = [c.on_core(w) * (self.forward[w] + self.backward[w]) for w in range(c.workers)]
        return sum(min(each[w] for w in c.alive(stage)) for stage in range(c.stages))

    def least(self, worker: int, count: int) -> float:
        """Seconds that `count` microbatches on `worker` take at least."""
        c, stage = self.conditions, worker % self.conditions.stages
        forward, early, backward = self.forward[worker], self.early[worker], self.backward[worker]
        room = count  # what is recomputed takes hardly any before its backward
        if not c.pipeline.recompute:
            room = math.floor(min(c.activation_budget[worker], count) + 1e-6)
        begun = self.head[worker] + max(0.0, self.trip[worker] - (room - 1) * forward)
        ways = (stage > 0) + (stage < c.stages - 1)
        return max(
            begun + count * (forward + backward),
            begun + count * (forward + early) + self.home[worker],
            count * ways * c.port(worker),
        )


def even_shares(costs: Sequence[Callable[[int], float]], count: int) -> list[int]:
    """Numbers that add up to `count` and whose greatest cost is the least there is.

    Args:
        costs: per worker, seconds of so many microbatches; it grows with their number, and is
            infinite for a worker that is to have none.
        count: microbatches in all.
    """
    shares = [0] * len(costs)
    heap = [(cost(1), i) for i, cost in enumerate(costs)]
    heapify(heap)
    for _ in range(count):
        _, i = heap[0]
        shares[i] += 1
        heapreplace(heap, (costs[i](shares[i] + 1), i))
    return shares
