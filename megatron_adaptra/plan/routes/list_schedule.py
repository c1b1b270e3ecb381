"""A list scheduler for several replicas: given who runs what, each worker takes what is ready.

A gradient first, then a forward that fits in its memory, then a weight half. Workers see what is
under way to them, so a rule can hold back what would make an arriving message wait. No order that
it makes can hang for memory: what a worker holds waits only for later stages, and the last stage
for nothing. (Where only some workers take forwards in turn it may find no order.)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import INPUT_HALF, Schedule

Runs = list[list[int]]  # per stage and unit, the worker that runs it
SAME = 1e-9  # of a forward: moments that are one
_FREE, _FORWARD, _BACKWARD = range(3)


class Rule(NamedTuple):
    """A rule chooses the op that one worker runs when it is free.

    Args:
        forward: share of a forward by which it may keep an arriving gradient waiting.
        weight: share of a weight half by which it may keep an arriving gradient, or forward that
            fits, waiting.
        forward_first: a forward that fits goes before a gradient that is there.
        in_turn: forwards run in the order of turns, those that are there wait for others.
        in_flight: microbatches that it holds at most, within its budget.
    """

    forward: float = 1.0
    weight: float = 1.0
    forward_first: bool = False
    in_turn: bool = False
    in_flight: float = math.inf


class Made(NamedTuple):
    """A made list schedule has its order and its times.

    Args:
        order: per worker, kind and unit of each op; a kind is F, I or B, or W.
        seconds: to the end of the last op.
        ends: per worker, when its last op ends.
    """

    order: list[list[tuple[Kind, int]]]
    seconds: float
    ends: list[float]


class Workers:
    """A set of workers holds the costs of a job, looked up once.

    A *unit* is one microbatch of one home: `home * microbatches + microbatch`.
    """

    def __init__(self, conditions: ReplicaConditions) -> None:
        c = self.conditions = conditions
        self.stages, self.replicas, self.count = c.stages, c.replicas, c.microbatches
        self.units, self.workers = c.replicas * c.microbatches, c.workers
        self.split = c.pipeline.split
        self.ops = self.units * self.stages * (3 if self.split else 2)
        backward = Kind.I if self.split else Kind.B
        each = range(c.workers)
        self.forward = [c.seconds(Kind.F, w) for w in each]
        self.backward = [c.seconds(backward, w) for w in each]
        self.weight = [c.seconds(Kind.W, w) if self.split else 0.0 for w in each]
        self.port = [c.port(w) for w in each]
        self.budget = [budget + SAME for budget in c.activation_budget]
        self.eps = SAME * max(max(self.forward), 1e-12)
        self.links: dict[tuple[int, int], tuple[float, float]] = {}  # wire, delay
        # Units in the order in which stages prefer them: microbatch by microbatch.
        count, replicas = self.count, self.replicas
        self.turns = [k % replicas * count + k // replicas for k in range(self.units)]

    def link(self, source: int, target: int) -> tuple[float, float]:
        """Return the wire seconds and the delay of a message from `source` to `target`."""
        known = self.links.get((source, target))
        if known is None:
            c = self.conditions
            delay = c.link(source, target).delay
            known = self.links[source, target] = c.passes(source, target), delay
        return known

    def schedule(self, made: Made, policy: str) -> Schedule:
        """Return the list schedule `made` as a Schedule of this `policy`."""
        count = self.count
        order = tuple(
            tuple(Op(kind, unit % count, 0, unit // count) for kind, unit in line)
            for line in made.order
        )
        return Schedule(order, count, policy=policy, replicas=self.replicas)


def list_schedule(
    workers: Workers,
    runs: Runs,
    rules: Sequence[Rule],
    turns: Sequence[int],
    limit: float = math.inf,
) -> Made | None:
    """Return the order that these `rules`, one per worker, lead to.

    Args:
        workers: the job.
        runs: per stage and unit, the worker that runs it.
        rules: per worker.
        turns: all units; of those that are ready, a worker takes the one that comes first here.
        limit: seconds; None is returned as soon as it is clear to take longer, and where a worker
            that takes forwards in turn waits for another one that does not, and this for memory.
    """
    return _Run(workers, runs, rules, turns).run(limit)


class _Run:
    def __init__(
        self, workers: Workers, runs: Runs, rules: Sequence[Rule], turns: Sequence[int]
    ) -> None:
        self.jobs, self.runs, self.turns = workers, runs, turns
        self.rank = [0] * workers.units
        for rank, unit in enumerate(turns):
            self.rank[unit] = rank
        each = range(workers.workers)
        self.budget = [
            min(budget, max(1.0, rule.in_flight) + SAME)
            for budget, rule in zip(workers.budget, rules, strict=True)
        ]
        self.forward_gap = [workers.forward[w] * (1 - rules[w].forward) - workers.eps for w in each]
        self.weight_gap = [workers.weight[w] * (1 - rules[w].weight) - workers.eps for w in each]
        self.forward_first = [rule.forward_first for rule in rules]
        # Of workers in turn the ranks of all forwards that are left, the last one first.
        self.next: dict[int, list[int]] = {w: [] for w in each if rules[w].in_turn}
        self.forwards: list[list[int]] = [[] for _ in each]  # ranks of those that can start
        self.backwards: list[list[int]] = [[] for _ in each]
        self.halves: list[deque[int]] = [deque() for _ in each]  # units whose weight half is left
        self.coming: list[list[float]] = [[] for _ in each]  # arrivals of gradients under way
        self.filling: list[list[float]] = [[] for _ in each]  # arrivals of forwards under way
        self.held, self.free = [0.0] * workers.workers, [0.0] * workers.workers
        self.order: list[list[tuple[Kind, int]]] = [[] for _ in each]
        self.events: list[tuple[float, int, int, int]] = []  # time, what, worker, unit
        self.sent: dict[tuple[int, int], float] = {}  # by path or port, when it is free again
        self.left = [0.0] * workers.workers  # seconds of work
        for stage, line in enumerate(runs):
            for unit, worker in enumerate(line):
                total = workers.forward[worker] + workers.backward[worker] + workers.weight[worker]
                self.left[worker] += total
                if stage == 0:
                    self.forwards[worker].append(self.rank[unit])
                if worker in self.next:
                    self.next[worker].append(self.rank[unit])
        for ranks in self.next.values():
            ranks.sort(reverse=True)
        for ready in self.forwards:
            heapify(ready)

    def run(self, limit: float) -> Made | None:
        jobs, events, free = self.jobs, self.events, self.free
        rank, eps = self.rank, jobs.eps
        for worker in range(jobs.workers):
            if not self.choose(worker, 0.0, limit):
                return None
        while events:
            now = events[0][0]
            moved = []
            while events and events[0][0] <= now + eps:
                _, what, worker, unit = heappop(events)
                if what == _FORWARD:
                    heappush(self.forwards[worker], rank[unit])
                elif what == _BACKWARD:
                    heappush(self.backwards[worker], rank[unit])
                elif unit >= 0:  # an op has ended whose message has to queue
                    self.queue(worker, unit, now)
                moved.append(worker)
            for worker in dict.fromkeys(moved):
                if free[worker] <= now + eps and not self.choose(worker, now, limit):
                    return None
        if sum(map(len, self.order)) < jobs.ops:
            return None
        return Made(self.order, max(free), free)

    def choose(self, worker: int, now: float, limit: float) -> bool:
        """Start what the worker should run next, if anything; False once `limit` is missed."""
        jobs = self.jobs
        forwards, backwards = self.forwards[worker], self.backwards[worker]
        halves = self.halves[worker]
        room = self.held[worker] + 1.0 <= self.budget[worker]
        fits = room and bool(forwards)
        if fits and worker in self.next:
            fits = forwards[0] == self.next[worker][-1]
        if backwards and not (fits and self.forward_first[worker]):
            unit = self.turns[heappop(backwards)]
            return self.start(worker, _BACKWARD, unit, jobs.backward[worker], now, limit)
        coming = self.coming[worker]
        while coming and coming[0] <= now + jobs.eps:  # as `run` takes it for arrived
            heappop(coming)
        gradient = coming[0] - now if coming else math.inf
        if fits and gradient >= self.forward_gap[worker]:
            unit = self.turns[heappop(forwards)]
            return self.start(worker, _FORWARD, unit, jobs.forward[worker], now, limit)
        if halves and not fits and gradient >= self.weight_gap[worker]:
            filling = self.filling[worker]
            while filling and filling[0] <= now + jobs.eps:
                heappop(filling)
            if room and filling and filling[0] - now < self.weight_gap[worker]:
                return True
            self.held[worker] -= 1.0 - INPUT_HALF
            return self.start(worker, _FREE, halves.popleft(), jobs.weight[worker], now, limit)
        return True

    def start(
        self, worker: int, what: int, unit: int, seconds: float, now: float, limit: float
    ) -> bool:
        """Run an op: a forward, a backward or (`_FREE`) a weight half."""
        jobs, stage = self.jobs, worker % self.jobs.stages
        end = now + seconds
        self.free[worker] = end
        self.left[worker] -= seconds
        if end + self.left[worker] > limit:
            return False
        sends = -1
        if what == _FORWARD:
            self.order[worker].append((Kind.F, unit))
            self.held[worker] += 1.0
            if worker in self.next:
                self.next[worker].pop()
            if stage + 1 < jobs.stages:
                sends = self.runs[stage + 1][unit]
            else:
                heappush(self.events, (end, _BACKWARD, worker, unit))
        elif what == _BACKWARD:
            self.order[worker].append((Kind.I if jobs.split else Kind.B, unit))
            self.held[worker] -= INPUT_HALF if jobs.split else 1.0
            if jobs.split:
                self.halves[worker].append(unit)
            if stage:
                sends = self.runs[stage - 1][unit]
        else:
            self.order[worker].append((Kind.W, unit))
        queued = -1
        if sends >= 0:
            arrival = end
            if sends != worker:
                wire, delay = jobs.link(worker, sends)
                arrival += wire + delay
                if wire > 0:
                    queued = 2 * unit + (what == _BACKWARD)
            heappush((self.coming if what == _BACKWARD else self.filling)[sends], arrival)
            if queued < 0:
                heappush(self.events, (arrival, what, sends, unit))
        heappush(self.events, (end, _FREE, worker, queued))
        return True

    def queue(self, source: int, queued: int, now: float) -> None:
        """Put the message of an op that has ended on its path."""
        jobs = self.jobs
        unit, back = divmod(queued, 2)
        stage = source % jobs.stages
        target = self.runs[stage - 1 if back else stage + 1][unit]
        wire, delay = jobs.link(source, target)
        ways: list[tuple[int, int]] = [(source, target)]
        if jobs.port[source] > 0:
            ways.append((source, -1))
        if jobs.port[target] > 0:
            ways.append((-1, target))
        left = max([now, *(self.sent.get(way, 0.0) for way in ways)]) + wire
        for way in ways:
            self.sent[way] = left
        what = _BACKWARD if back else _FORWARD
        heappush(self.events, (left + delay, what, target, unit))
