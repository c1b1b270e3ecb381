"""Rounds of StragglAR for any number of ranks and pieces: a matching per round, by search."""

from __future__ import annotations

import random
from typing import NamedTuple

from megatron_adaptra.model.all_reduce_forms import least_rounds
from megatron_adaptra.plan.collectives.stragglar_rounds import Copy, Rounds

_WORK = 500_000  # pairs of ranks that all tries look at, about: bounds the planning time


class _Weights(NamedTuple):
    """What makes a copy urgent; see `_Try.urgency`."""

    lag: float
    age: float
    soon: float
    noise: float


def searched_rounds(ranks: int, k: int) -> Rounds:
    """The shortest rounds that a bounded number of tries find; equal in each run.

    `ranks`: at least 4; `k`: pieces per owner. In a round any rank may send to one and receive
    from another. Stops at `least_rounds`.
    """
    rng = random.Random(ranks * 1009 + k)
    least = least_rounds(ranks, k)
    best: Rounds | None = None
    for _ in range(max(2, _WORK // (least * ranks * ranks))):
        weights = _Weights(
            rng.choice((0, 1, 3)),
            rng.choice((0, 0.5, 2, -0.5)),
            rng.choice((0, 0.5, 1, 3)),
            rng.choice((0.1, 2, 6)),
        )
        rounds = _Try(ranks, k, weights, rng).run(None if best is None else len(best))
        best = rounds or best
        if best is not None and len(best) == least:
            break
    assert best is not None  # the first try has no limit
    return best


class _Try:
    def __init__(self, ranks: int, k: int, weights: _Weights, rng: random.Random) -> None:
        self.owners, self.pieces = ranks - 1, k * (ranks - 1)
        self.depth = (ranks - 1).bit_length()
        self.weights, self.rng = weights, rng
        self.held = [0] * self.owners  # the sums that each rank has, as bits
        self.holders = [0] * self.pieces
        self.now = 0

    def run(self, limit: int | None) -> Rounds | None:
        """All rounds, or None if there would not be fewer than `limit`."""
        rounds: Rounds = []
        everything = (1 << self.pieces) - 1
        while self.now < self.pieces or any(held != everything for held in self.held):
            if limit is not None and len(rounds) + 1 >= limit:
                return None
            copies = self.matched()
            for _, target, piece in copies:
                self.held[target] |= 1 << piece
                self.holders[piece] += 1
            if self.now < self.pieces:
                self.held[self.now % self.owners] |= 1 << self.now
                self.holders[self.now] += 1
            rounds.append(copies)
            self.now += 1
        return rounds

    def urgency(self, piece: int) -> float:
        """More where a piece has fewer holders than perfect doubling gives, and by its age."""
        age = self.now - 1 - piece
        full = min(self.owners, 1 << min(age + 1, 30))
        lag = max(0, full - self.holders[piece]) / full
        return 10 + self.weights.lag * 6 * lag + self.weights.age * age

    def matched(self) -> list[Copy]:
        """Greedy by urgency, then more copies by augmenting paths (Kuhn)."""
        busy = self.now % self.owners if self.now < self.pieces else -1
        urgent = {
            piece: self.urgency(piece)
            for piece in range(min(self.now, self.pieces))
            if self.holders[piece] < self.owners
        }
        bits = [(1 << piece, piece, value) for piece, value in urgent.items()]
        held = dict(enumerate(self.held))
        if busy < 0:
            held[self.owners] = (1 << self.pieces) - 1
        held.pop(busy, None)
        edges: dict[int, dict[int, int]] = {source: {} for source in held}
        order = []
        for target in held:
            lacks = [one for one in bits if not held[target] & one[0]]
            if not lacks:
                continue
            due = (target - self.now) % self.owners
            soon = 0.0
            if self.now + due < self.pieces and due <= self.depth:
                soon = self.weights.soon * (self.depth - due + 1)
            for source, has in held.items():
                best, chosen = 0.0, -1
                for bit, piece, value in lacks:
                    if has & bit:
                        weight = value + soon * (self.now - 1 - piece)
                        weight += self.weights.noise * self.rng.random()
                        if chosen < 0 or weight > best:
                            best, chosen = weight, piece
                if chosen >= 0:
                    edges[source][target] = chosen
                    order.append((best, source, target))
        order.sort(reverse=True)
        source_of: dict[int, int] = {}
        used: set[int] = set()
        for _, source, target in order:
            if source not in used and target not in source_of:
                used.add(source)
                source_of[target] = source
        for source in edges:
            if source not in used:
                _augment(source, edges, source_of, set())
        return [(s, t, edges[s][t]) for t, s in sorted(source_of.items())]


def _augment(
    source: int, edges: dict[int, dict[int, int]], source_of: dict[int, int], seen: set[int]
) -> bool:
    for target in edges[source]:
        if target not in seen:
            seen.add(target)
            if target not in source_of or _augment(source_of[target], edges, source_of, seen):
                source_of[target] = source
                return True
    return False
