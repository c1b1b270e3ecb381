"""A list scheduler: stages take what is ready by a rule, in the order of time.

One pass builds an order in about a microsecond per op; the planner tries many rules. What a stage
may start next is bounded by its memory, and by what would leave the oldest microbatch stuck (the
banker's condition). A forward that does not fit as a whole can keep its input alone, and be
recomputed before its backward.

A stage sees what its neighbours have under way, so a rule can hold an op back that would make an
arriving gradient wait: a gradient is on the critical cycle whenever memory is short.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from megatron_adaptra.ir.schedule import INPUT_HALF, RECOMPUTED_SHARE
from megatron_adaptra.plan.pipeline.search.job_shop import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    ROOM,
    WEIGHT,
    JobShop,
    Order,
)
from megatron_adaptra.plan.pipeline.search.search_budget import late

SAME = 1e-12  # seconds that do not count
LOOKS = 1000  # events, about 1 ms, between two looks at the clock


class Rule(NamedTuple):
    """A rule chooses the op that one stage runs when it is free."""

    forward: float = 1.0  # share of a forward by which it may keep a gradient waiting
    weight: float = 1.0  # share of a weight half by which it may keep a gradient or forward waiting
    reserve: float = 0.0  # room that whole microbatches leave to those that are recomputed
    recomputed_first: bool = False  # recomputed forwards before weight halves
    forward_first: bool = False  # a forward that fits before a gradient that is there
    make_room: bool = False  # a weight half before that gradient, if it makes room for a forward
    depth_first: bool = True  # of several chunks, the forward that is nearest to the loss
    recompute_early: bool = False  # recomputes ahead of need before weight halves
    recomputed_in_warmup: bool = False  # recomputed forwards only before the first backward
    in_flight: float = math.inf  # microbatches it has in flight at most, whole or recomputed


def dispatch(
    shop: JobShop,
    rules: Sequence[Rule],
    recompute: bool = False,
    limit: float = math.inf,
    end: float = math.inf,
) -> Order | None:
    """Return the order that the rules, one per stage, lead to. `recompute`: whether to use it.

    None if they run into a dead end, as soon as the order is sure to take longer than `limit`
    seconds, and at the `end` of the search.
    """
    return _Dispatch(shop, rules, recompute).run(limit, end)


class _Dispatch:
    def __init__(self, shop: JobShop, rules: Sequence[Rule], recompute: bool) -> None:
        self.shop, self.rules, self.recompute = shop, rules, recompute
        positions, count, stages = shop.positions, shop.count, shop.stages
        self.activations: list[list[float]] = [[] for _ in range(positions)]  # their arrival
        self.gradients: list[list[float]] = [[] for _ in range(positions)]
        self.activations[0] = [0.0] * count
        self.forwards, self.backwards = [0] * positions, [0] * positions  # how many have begun
        self.weights, self.recomputes = [0] * positions, [0] * positions
        self.recomputed: list[set[int]] = [set() for _ in range(positions)]
        self.held, self.free = [0.0] * stages, [0.0] * stages
        self.budget = [budget + ROOM for budget in shop.budget]
        self.flying = [0] * stages  # chunks of microbatches, forward begun and backward not
        self.depth = [max(1.0, rule.in_flight) * shop.chunks for rule in rules]
        self.order: Order = [[] for _ in range(stages)]
        self.events = [(0.0, stage) for stage in range(stages)]
        self.sent: dict[tuple[int, int], float] = {}  # when the last message has left it
        self.guarded = recompute or shop.chunks > 1
        own = [range(s, positions, stages) for s in range(stages)]
        self.own = [tuple(row) for row in own]
        self.from_loss = [tuple(reversed(row)) for row in own]
        self.forward_choice = [
            deep if rule.depth_first else row
            for rule, deep, row in zip(rules, self.from_loss, self.own, strict=True)
        ]
        # Seconds that a gradient has to be away for an op to start before it.
        first = [shop.number(s, FORWARD, 0) for s in range(stages)]
        self.forward_gap, self.weight_gap = (
            [
                shop.seconds[first[s] + kind * count] * (1 - share) - SAME
                for s, share in enumerate(shares)
            ]
            for kind, shares in (
                (FORWARD, [rule.forward for rule in rules]),
                (WEIGHT, [rule.weight for rule in rules]),
            )
        )

    def run(self, limit: float, end_of_search: float) -> Order | None:
        left = self.left = self.work()
        shop, events, free, held, order = self.shop, self.events, self.free, self.held, self.order
        count, stages, last, share = shop.count, shop.stages, shop.positions - 1, shop.share
        seconds, lag, wires = shop.seconds, shop.lag, bool(shop.wires)
        half = share * (INPUT_HALF if shop.split else 1.0)
        looks = 0
        while events:
            looks += 1
            if looks % LOOKS == 0 and late(end_of_search):
                return None
            now, stage = heappop(events)
            if free[stage] > now:
                continue
            op = self.choose(stage, now)
            if op < 0:
                continue
            end = now + seconds[op]
            order[stage].append(op)
            free[stage] = end
            left[stage] -= seconds[op]
            if end + left[stage] > limit:
                return None
            heappush(events, (end, stage))
            block, k = divmod(op, count)
            x, kind = divmod(block, 4)
            if kind == FORWARD:
                self.forwards[x] = k + 1
                self.flying[stage] += 1
                held[stage] += share * RECOMPUTED_SHARE if k in self.recomputed[x] else share
                if x == last:
                    self.gradients[x].append(end)
                    continue
                user, queue = op + 4 * count, self.activations[x + 1]
            elif kind == BACKWARD:
                self.backwards[x] = k + 1
                self.flying[stage] -= 1
                held[stage] -= half
                if not shop.split:
                    self.weights[x] = k + 1
                if x == 0:
                    continue
                user, queue = op - 4 * count, self.gradients[x - 1]
            elif kind == WEIGHT:
                self.weights[x] = k + 1
                held[stage] -= share - half
                continue
            else:
                self.recomputes[x] = k + 1
                held[stage] += share * (1 - RECOMPUTED_SHARE)
                continue
            target = user // (4 * count) % stages
            moment = self.arrival(op, stage, target, end) if wires else end + lag[user]
            queue.append(moment)
            if free[target] <= now:  # a busy stage looks for itself when it is done
                heappush(events, (moment, target))
        done = sum(map(len, order))
        wanted = count * shop.positions * (3 if shop.split else 2)
        return order if done == wanted + sum(map(len, self.recomputed)) else None

    def work(self) -> list[float]:
        """Return, per stage, the seconds of all ops that every order has."""
        shop, kinds = (
            self.shop,
            (FORWARD, BACKWARD, WEIGHT) if self.shop.split else (FORWARD, BACKWARD),
        )
        return [
            shop.count * sum(shop.seconds[shop.number(x, kind, 0)] for x in own for kind in kinds)
            for own in self.own
        ]

    def choose(self, stage: int, now: float) -> int:
        """Return the op that the rule asks for; -1 to sleep until something arrives."""
        rule, count, limit = self.rules[stage], self.shop.count, now + SAME
        soon = math.inf  # when the next gradient arrives, of those that are on their way
        due = -1  # a position whose gradient is here
        for x in self.from_loss[stage]:
            queue, k = self.gradients[x], self.backwards[x]
            if k < len(queue):
                if queue[k] <= limit:
                    if due < 0:
                        due = x
                elif queue[k] < soon:
                    soon = queue[k]
        if due >= 0 and not (rule.forward_first or rule.make_room):
            return self.backward_or_recompute(stage, due, limit)
        ready, later = -1, math.inf  # a position whose activation is here; when the next one comes
        if self.flying[stage] < self.depth[stage]:
            for x in self.forward_choice[stage]:
                queue, k = self.activations[x], self.forwards[x]
                if k < len(queue):
                    if queue[k] <= limit:
                        if ready < 0:
                            ready = x
                    elif queue[k] < later:
                        later = queue[k]
        share, room = self.shop.share, self.budget[stage] - self.held[stage]
        needed = share + rule.reserve if self.recompute else share
        if due >= 0:
            if ready >= 0:
                if needed <= room:
                    if rule.forward_first and (not self.guarded or self.holds(stage, ready, share)):
                        return 4 * ready * count + self.forwards[ready]
                elif rule.make_room and needed <= room + share * (1 - INPUT_HALF):
                    weight = self.pending_weight(stage)
                    if weight >= 0:
                        return weight
            return self.backward_or_recompute(stage, due, limit)
        wait = soon - now
        whole = fits = False
        if ready >= 0:
            whole = needed <= room and (not self.guarded or self.holds(stage, ready, share))
            if wait >= self.forward_gap[stage]:
                if whole:
                    return 4 * ready * count + self.forwards[ready]
                fits = (
                    self.recompute
                    and RECOMPUTED_SHARE * share <= room
                    and not (rule.recomputed_in_warmup and self.backwards[ready])
                    and self.holds(stage, ready, RECOMPUTED_SHARE * share)
                )
        if fits and self.pending_weights_free(stage, needed - room):
            return self.pending_weight(stage)
        if rule.recompute_early and ready < 0 and wait >= self.forward_gap[stage]:
            op = self.recompute_ahead(stage, room)
            if op >= 0:
                return op
        if not (fits and rule.recomputed_first):
            weight = self.pending_weight(stage)
            if weight >= 0:
                blocked = ready >= 0 and not whole
                if self.weight_gap[stage] <= (wait if blocked else min(soon, later) - now):
                    return weight
        if fits:
            self.recomputed[ready].add(self.forwards[ready])
            self.left[stage] += self.shop.seconds[(4 * ready + RECOMPUTE) * count]
            return 4 * ready * count + self.forwards[ready]
        if self.recompute and wait >= self.forward_gap[stage]:
            op = self.recompute_ahead(stage, room)
            if op >= 0:
                return op
        wake = soon if soon < later else later
        if wake < math.inf:
            heappush(self.events, (wake, stage))
        return -1

    def backward_or_recompute(self, stage: int, x: int, limit: float) -> int:
        """Return the backward of position x, whose gradient is here, or the op that it lacks.

        Where a recompute does not fit, another position that has its gradient may free the room.
        """
        k, count = self.backwards[x], self.shop.count
        if not self.recompute or k not in self.recomputed[x] or self.recomputes[x] > k:
            return (4 * x + BACKWARD) * count + k
        if (1 - RECOMPUTED_SHARE) * self.shop.share <= self.budget[stage] - self.held[stage]:
            return (4 * x + RECOMPUTE) * count + k
        for other in self.from_loss[stage]:
            queue, k = self.gradients[other], self.backwards[other]
            if k < len(queue) and queue[k] <= limit and k not in self.recomputed[other]:
                return (4 * other + BACKWARD) * count + k
        return self.pending_weight(stage)

    def arrival(self, op: int, source: int, target: int, end: float) -> float:
        """Return when the output of `op` arrives; messages of a link, or port, form a queue."""
        link = source, target
        if link not in self.shop.wires:
            return end + self.shop.lag[self.shop.consumer[op]]
        wire, queue = self.shop.wires[link]
        self.sent[queue] = left = max(self.sent.get(queue, 0.0), end) + wire
        return left + self.shop.conditions.link(*link).delay

    def pending_weight(self, stage: int) -> int:
        """Return a weight half that can run, of the position nearest to the loss; -1 for none."""
        for x in self.from_loss[stage]:
            if self.weights[x] < self.backwards[x]:
                return (4 * x + WEIGHT) * self.shop.count + self.weights[x]
        return -1

    def pending_weights_free(self, stage: int, room: float) -> bool:
        """Return whether the weight halves that can run would free so much `room`."""
        pending = 0
        for x in self.own[stage]:
            pending += self.backwards[x] - self.weights[x]
        return pending > 0 and room <= pending * self.shop.share * (1 - INPUT_HALF)

    def recompute_ahead(self, stage: int, room: float) -> int:
        """Return a recompute ahead of need; -1 for none, or to leave room to forwards to come.

        All of these forwards have to find room for their inputs.
        """
        share, own = self.shop.share, self.own[stage]
        if share * (1 - RECOMPUTED_SHARE) > room:
            return -1
        coming = len(own) * self.shop.count
        for x in own:
            coming -= self.forwards[x]
        if share * (1 - RECOMPUTED_SHARE + RECOMPUTED_SHARE * coming) > room:
            return -1
        op = self.next_recompute(stage)
        if op >= 0 and self.shop.chunks > 1:
            block, k = divmod(op, self.shop.count)
            if not self.safe(stage, block // 4, k, share * (1 - RECOMPUTED_SHARE), share):
                return -1
        return op

    def next_recompute(self, stage: int) -> int:
        """Return the recompute of the next recomputed microbatch that lacks it; -1 for none."""
        for x in self.from_loss[stage]:
            k, recomputed = max(self.recomputes[x], self.backwards[x]), self.recomputed[x]
            while k < self.forwards[x] and k not in recomputed:
                k += 1
            self.recomputes[x] = k
            if k < self.forwards[x]:
                return (4 * x + RECOMPUTE) * self.shop.count + k
        return -1

    def holds(self, stage: int, ready: int, room: float) -> bool:
        """Return whether the next forward of position `ready` may take that `room`; see `safe`."""
        return self.safe(stage, ready, self.forwards[ready], room, room)

    def safe(self, stage: int, at: int, k: int, takes: float, holds: float) -> bool:
        """Return whether all microbatches here can still be finished, in turn, after an op.

        The op, of microbatch `k` at position `at`, takes room `takes`; then the stage holds `holds`
        of that one. A weight half can always run, so room that only waits for one counts as free.
        """
        share, own = self.shop.share, self.own[stage]
        room = self.budget[stage] - self.held[stage] - takes
        for x in own:
            room += share * (1 - INPUT_HALF) * (self.backwards[x] - self.weights[x])
        if room >= 1.0:
            return True
        first = min([self.backwards[x] for x in own])
        last = max([k + 1, *[self.forwards[x] for x in own]])
        for older in range(first, last):
            needed = held = 0.0
            for x in own:
                if self.backwards[x] > older:
                    continue
                if x == at and older == k:
                    needed += share - holds
                    held += holds
                elif self.forwards[x] <= older:
                    needed += share
                elif older in self.recomputed[x] and self.recomputes[x] <= older:
                    needed += share * (1 - RECOMPUTED_SHARE)
                    held += share * RECOMPUTED_SHARE
                else:
                    held += share
            if needed > room:
                return False
            room += held
            if room >= 1.0:
                return True
        return True
