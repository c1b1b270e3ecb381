"""Tabu search on orders: move ops within the critical path's blocks, never twice the same way.

The job-shop tabu search of Nowicki and Smutnicki (Management Science 42(6), 1996), with insertions
as of Balas and Vazacopoulos (1998) and moves judged by heads and tails before they are timed. Only
an exchange at the border of a *block* (ops of one stage that follow each other on the longest path)
can shorten that path. What is added to it here is memory: a move has to fit, and where it does not,
a microbatch between may be recomputed before its backward; a recompute on the
longest path is taken back where memory allows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from megatron_adaptra.plan.pipeline.search.job_shop import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    ROOM,
    WEIGHT,
    JobShop,
    Order,
)
from megatron_adaptra.plan.pipeline.search.search_budget import SearchBudget

REACH = 12  # ops that a move passes at most
BORDER = 5  # ops at each end of a block that change places with their neighbours
STALLED = 14  # moves without a new best before the search goes back to it, and steps aside
PERTURBATIONS = 3  # steps aside, at most
FAR = 30  # ops that a step aside passes at most
TENURE = 8  # moves for which an undone sequence stays forbidden, and at most twice that


class Move(NamedTuple):
    """A move puts `ops` on `stage` from index `at` on, in place of as many that stand there."""

    seconds: float  # the longest path through the moved ops afterwards
    stage: int
    at: int
    ops: list[int]


class TabuSearch:
    """A tabu search shortens a copy of an order by `improve`; the result is `best` and `seconds`.

    Ops have numbers, see JobShop. A `line` is the ops of one stage, a `path` ops that follow each
    other on the longest path, `tails` the result of `tail_lengths`. `seed`: of random choices.
    """

    def __init__(self, shop: JobShop, order: Order, seed: int = 0) -> None:
        self.shop, self.recompute = shop, shop.conditions.recompute
        self.order: Order = [list(line) for line in order]
        self.random = random.Random(seed)
        self.budget = [budget + ROOM for budget in shop.budget]
        size = len(shop.seconds)
        self.next, self.previous = [-1] * size, [-1] * size
        self.held: list[list[float]] = [[] for _ in order]  # after each op of each line
        self.lag, self.step = [*shop.lag, 0.0], 0  # no op, number -1, waits for nothing
        self.tabu: dict[tuple[int, ...], int] = {}
        self.refresh()
        self.best: Order = [list(line) for line in self.order]
        self.seconds = self.timing.makespan

    def refresh(self) -> None:
        """Read the whole order anew."""
        self.recomputed = set().union(*map(self.recomputes, self.order))
        self.change = self.shop.holds(self.recomputed)
        for stage in range(self.shop.stages):
            self.refresh_line(stage)
        timing = self.shop.time(self.order)
        assert timing is not None
        self.timing = timing

    def refresh_line(self, stage: int) -> None:
        """Read the line of `stage` anew, once it has changed."""
        line, change = self.order[stage], self.change
        before, held, now = -1, [], 0.0
        for op in line:
            self.previous[op] = before
            if before >= 0:
                self.next[before] = op
            before = op
            now += change[op]
            held.append(now)
        self.next[before] = -1
        self.held[stage] = held

    def improve(self, effort: SearchBudget, bound: float, until: float = 1.0) -> None:
        """Search until the share `until` of the effort is spent, or `bound` seconds are reached."""
        same = 1e-9 * self.seconds
        size = sum(map(len, self.order))
        since = 0
        while effort.spent < until and self.seconds > bound + same:
            self.step += 1
            effort.spend(2 * size)
            tails = self.tail_lengths()
            path = self.longest_path()
            moves = self.moves(path, tails)
            effort.spend(8 * len(moves))
            if not (self.keep_activations(path) or self.make_best(moves) or self.perturb()):
                return
            if self.timing.makespan < self.seconds - same:
                self.seconds = self.timing.makespan
                self.best = [list(line) for line in self.order]
                since = 0
            else:
                since += 1
            if since > STALLED:
                self.restart()
                since = 0

    def restart(self) -> None:
        """Go back to the best order, and take a few random steps aside from it."""
        self.order = [list(line) for line in self.best]
        self.tabu.clear()
        self.refresh()
        for _ in range(1 + self.random.randrange(PERTURBATIONS)):
            self.perturb()

    def tail_lengths(self) -> list[float]:
        """Return, per op, seconds from its start to the end of everything that waits for it."""
        seconds, consumer = self.shop.seconds, self.shop.consumer
        lag, following = self.lag, self.next
        tails = [0.0] * (len(seconds) + 1)  # the last one is "none", number -1
        for op in reversed(self.timing.sequence):
            tail = tails[following[op]]
            user = consumer[op]
            other = lag[user] + tails[user]
            tails[op] = seconds[op] + (other if other > tail else tail)
        return tails

    def longest_path(self) -> list[int]:
        """Return one of the longest paths, at random, from its first op to its last."""
        end, seconds = self.timing.end, self.shop.seconds
        same = 1e-9 * self.timing.makespan
        last = [line[-1] for line in self.order if end[line[-1]] >= self.timing.makespan - same]
        op = self.random.choice(last)
        path = [op]
        while True:
            start = end[op] - seconds[op]
            if start <= same:
                break
            origins = []
            before = self.previous[op]
            if before >= 0 and end[before] >= start - same:
                origins.append(before)
            maker = self.shop.producer[op]
            if maker >= 0 and end[maker] + self.lag[op] >= start - same:
                origins.append(maker)
            if not origins:
                break  # it waited for a link that others kept busy
            op = origins[0] if len(origins) == 1 else self.random.choice(origins)
            path.append(op)
        path.reverse()
        return path

    def blocks(self, path: list[int]) -> Iterator[list[int]]:
        """Yield the blocks of a path: at least two ops that follow each other on one stage."""
        run: list[int] = []
        for op in path:
            if run and self.previous[op] == run[-1]:
                run.append(op)
            else:
                if len(run) > 1:
                    yield run
                run = [op]
        if len(run) > 1:
            yield run

    def moves(self, path: list[int], tails: list[float]) -> list[Move]:
        """Return insertions near the borders of the path's blocks, the most promising first."""
        out: list[Move] = []
        for block in self.blocks(path):
            stage, n = self.shop.stage_of(block[0]), len(block)
            start = self.order[stage].index(block[0])
            for a, to in insertions(n):
                ops = self.inserted(block, a, to)
                if ops:
                    low = min(a, to)
                    seconds = self.estimate(ops, block, low, tails)
                    out.append(Move(seconds, stage, start + low, ops))
        out.sort(key=lambda move: move[0])
        return out

    def needs(self, later: int, earlier: int) -> bool:
        """Return whether `later` has to follow `earlier`, for its input or its place in line."""
        count = self.shop.count
        kind, kind_before = later // count, earlier // count
        if kind == kind_before:
            return True
        if later % count != earlier % count or kind // 4 != kind_before // 4:
            return False
        kind, kind_before = kind % 4, kind_before % 4
        if kind_before == FORWARD:
            return True
        return (kind == WEIGHT and kind_before == BACKWARD) or (
            kind == BACKWARD and kind_before == RECOMPUTE
        )

    def estimate(self, ops: list[int], block: list[int], low: int, tails: list[float]) -> float:
        """Return the longest path, in seconds, through `ops` put at index `low` of `block`."""
        shop, end, lag = self.shop, self.timing.end, self.lag
        seconds, producer, consumer = shop.seconds, shop.producer, shop.consumer
        previous = self.previous[block[low]]
        t = end[previous] if previous >= 0 else 0.0
        ends = []
        for op in ops:
            maker = producer[op]
            if maker >= 0:
                ready = end[maker] + lag[op]
                if ready > t:
                    t = ready
            t += seconds[op]
            ends.append(t)
        tail = tails[self.next[block[low + len(ops) - 1]]]
        longest = 0.0
        for i in range(len(ops) - 1, -1, -1):
            op = ops[i]
            user = consumer[op]
            other = lag[user] + tails[user]
            if other > tail:
                tail = other
            if ends[i] + tail > longest:
                longest = ends[i] + tail
            tail += seconds[op]
        return longest

    def make_best(self, moves: list[Move]) -> bool:
        """Make the best move that is neither forbidden nor impossible."""
        for move in moves:
            if self.tabu.get(tuple(move.ops), 0) >= self.step and move.seconds >= self.seconds:
                continue
            if self.fits(move):
                if self.make(move):
                    return True
            elif self.recompute and self.make_recomputed(move):
                return True
        return False

    def fits(self, move: Move) -> bool:
        """Return whether the stage has the memory for a move."""
        held = self.held[move.stage][move.at - 1] if move.at else 0.0
        budget, change = self.budget[move.stage], self.change
        for op in move.ops:
            held += change[op]
            if held > budget:
                return False
        return True

    def make(self, move: Move) -> bool:
        """Make a move; False, and nothing changed, where it would hang."""
        line, n = self.order[move.stage], len(move.ops)
        old = line[move.at : move.at + n]
        line[move.at : move.at + n] = move.ops
        timing = self.shop.time(self.order)
        if timing is None:
            line[move.at : move.at + n] = old
            return False
        self.timing = timing
        self.tabu[tuple(old)] = self.step + TENURE + self.random.randrange(TENURE)
        self.refresh_line(move.stage)
        return True

    def make_recomputed(self, move: Move) -> bool:
        """Make room for a move: recompute the microbatch in flight whose backward is farthest."""
        shop, count = self.shop, self.shop.count
        line, end = list(self.order[move.stage]), move.at + len(move.ops)
        line[move.at : end] = move.ops
        begun = (op for op in reversed(line[:end]) if shop.kind_of(op) == FORWARD)
        victim = next((op for op in begun if op + RECOMPUTE * count not in self.recomputed), None)
        if victim is None:
            return False
        backward = line.index(victim + BACKWARD * count)
        if backward < end:
            return False
        line.insert(backward, victim + RECOMPUTE * count)
        return self.replace(move.stage, line)

    def keep_activations(self, path: list[int]) -> bool:
        """Keep the activations of a microbatch whose recompute is on the longest path."""
        for op in path:
            if op in self.recomputed:
                stage = self.shop.stage_of(op)
                line, held = self.order[stage], self.held[stage]
                start = line.index(op - RECOMPUTE * self.shop.count)
                if max(held[start : line.index(op)]) + self.change[op] <= self.budget[stage]:
                    return self.replace(stage, [other for other in line if other != op])
        return False

    def replace(self, stage: int, line: list[int]) -> bool:
        """Take another `line` for `stage`, with other recomputes, if it fits and runs."""
        old = self.order[stage]
        recomputed = self.recomputed ^ self.recomputes(old) ^ self.recomputes(line)
        change, held = self.shop.holds(recomputed), 0.0
        for op in line:
            held += change[op]
            if held > self.budget[stage]:
                return False
        self.order[stage] = line
        timing = self.shop.time(self.order)
        if timing is None:
            self.order[stage] = old
            return False
        self.timing, self.change, self.recomputed = timing, change, recomputed
        self.refresh_line(stage)
        return True

    def recomputes(self, line: list[int]) -> set[int]:
        """Return the R ops of a line."""
        return {op for op in line if self.shop.kind_of(op) == RECOMPUTE}

    def perturb(self) -> bool:
        """Put one op elsewhere by chance; False where nothing was found."""
        rng = self.random
        for _ in range(50):
            stage = rng.randrange(self.shop.stages)
            line = self.order[stage]
            a = rng.randrange(len(line))
            b = a + rng.choice((-1, 1)) * rng.randrange(1, FAR + 1)
            if not 0 <= b < len(line):
                continue
            move = Move(0.0, stage, min(a, b), self.inserted(line, a, b))
            if move.ops and self.fits(move) and self.make(move):
                return True
        return False

    def inserted(self, ops: list[int], a: int, to: int) -> list[int]:
        """Return the `ops` between places `a` and `to` once the op at `a` has moved to `to`.

        Empty where it must not stand there.
        """
        op = ops[a]
        if a < to:
            passed = ops[a + 1 : to + 1]
            return [] if any(self.needs(other, op) for other in passed) else [*passed, op]
        passed = ops[to:a]
        return [] if any(self.needs(op, other) for other in passed) else [op, *passed]


def insertions(n: int) -> list[tuple[int, int]]:
    """Return the moves, from and to, of ops in a block of `n`: to its borders, and near them."""
    out = set()
    for a in range(n):
        near_end, near_start = n - 1 - a, a
        if near_end <= REACH:
            out.add((a, n - 1))
        if near_start <= REACH:
            out.add((a, 0))
        if near_end < BORDER or near_start < BORDER:
            out.update((a, a + step) for step in (-2, -1, 1, 2) if 0 <= a + step < n)
    return sorted((a, to) for a, to in out if a != to)
