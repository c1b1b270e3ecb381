"""Rounds of StragglAR (arXiv 2505.23523, version 2): who copies which sum to whom, round by round.

In round t the late rank, which is the last one, and owner t mod (N - 1) exchange piece t, so that
both have its sum. All other ranks copy sums meanwhile: each sends at most one piece in a round,
and receives at most one. For a power of two of ranks that is known; for any number of ranks and
pieces a matching per round is searched for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from megatron_adaptra.model.all_reduce_forms import least_rounds

Copy = tuple[int, int, int]  # source, target, piece
Rounds = list[list[Copy]]
_WORK = 40_000  # ranks in rounds that all tries look at, about: bounds the planning time
_Lacks = dict[int, list[tuple[float, int]]]  # by target: weights and pieces


def power_of_two_rounds(ranks: int) -> Rounds:
    """N - 2 + log2 N rounds of copies for N `ranks`, a power of two of at least 4; one piece each.

    Each rank but the late one holds one active piece: one that not all have. The oldest has N/2
    holders. Each of them, but for the owner of the round, is paired with a rank that holds another
    active piece, and they copy both pieces: so the holders of all active pieces double. An owner
    has to hold the oldest piece in its own round: it takes the right piece ahead of that.
    """
    depth = ranks.bit_length() - 1
    last = ranks - 1
    active: dict[int, int] = {}  # rank -> the active piece that it holds
    empty = iter(range(2 * depth - 1, last))
    rounds: Rounds = []
    for now in range(last + depth - 1):
        copies = list(_first(now, depth, active, empty) if now < depth else ())
        if now >= depth:
            copies = _exchanged(now, now - depth, depth, last, active)
        rounds.append(copies)
        if now < last:
            active[now] = now
    return rounds


def _first(now: int, depth: int, active: dict[int, int], empty: Iterator[int]) -> Iterator[Copy]:
    """All holders copy to ranks that have none; owners that are soon busy get the piece in time."""
    for source, piece in sorted(active.items()):
        target = piece + depth if piece == now - 1 else next(empty)
        active[target] = piece
        yield source, target, piece


def _exchanged(now: int, oldest: int, depth: int, last: int, active: dict[int, int]) -> list[Copy]:
    free = [rank for rank in sorted(active) if active[rank] == oldest and rank != now]
    soon = [rank for rank in free if now < rank < min(now + depth, last)]
    holders: dict[int, list[int]] = {}
    for rank in sorted(active, reverse=True):
        if active[rank] != oldest:
            holders.setdefault(active[rank], []).append(rank)
    pairs = [(rank, holders[rank - depth].pop()) for rank in soon]
    rest = [rank for piece in sorted(holders) for rank in reversed(holders[piece])]
    others = [rank for rank in free if rank not in soon]
    pairs += zip(others, rest, strict=False)
    copies: list[Copy] = []
    for rank, holder in pairs:
        copies += [(rank, holder, oldest), (holder, rank, active[holder])]
        active[rank] = active[holder]
    if now >= last and len(others) > len(rest):  # the late rank has the last piece as well
        copies.append((last, others[-1], last - 1))
        active[others[-1]] = last - 1
    return copies


class _Weights(NamedTuple):
    """A set of weights tunes how urgent a copy is; see `_Try.urgency`."""

    lag: float
    age: float
    soon: float
    noise: float


def searched_rounds(ranks: int, k: int) -> Rounds:
    """Find the shortest rounds in a bounded number of tries; equal in each run.

    `ranks`: at least 4; `k`: pieces per owner. In a round any rank may send to one and receive
    from another. Stops at `least_rounds`.
    """
    rng = random.Random(ranks * 1009 + k)
    least = least_rounds(ranks, k)
    best: Rounds | None = None
    for _ in range(max(2, _WORK // (least * ranks))):
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
        self.holders: dict[int, int] = {}  # of pieces that not all have: who has it, as bits
        self.now = 0

    def run(self, limit: int | None) -> Rounds | None:
        """Return all rounds, or None if there would not be fewer than `limit`."""
        rounds: Rounds = []
        others = (1 << self.owners) - 1
        while self.now < self.pieces or self.holders:
            if limit is not None and len(rounds) + 1 >= limit:
                return None
            copies = self.matched()
            for _, target, piece in copies:
                self.holders[piece] |= 1 << target
            if self.now < self.pieces:
                self.holders[self.now] = 1 << self.now % self.owners
            self.holders = {piece: who for piece, who in self.holders.items() if who != others}
            rounds.append(copies)
            self.now += 1
        return rounds

    def urgency(self, piece: int) -> float:
        """Return a weight: more with fewer holders than perfect doubling gives, and by age."""
        age = self.now - 1 - piece
        full = min(self.owners, 1 << min(age + 1, 30))
        lag = max(0, full - self.holders[piece].bit_count()) / full
        return 10 + self.weights.lag * 6 * lag + self.weights.age * age

    def matched(self) -> list[Copy]:
        """Match copies greedily by urgency, then add more by augmenting paths (Kuhn)."""
        ranks = (1 << self.owners) - 1
        if self.now < self.pieces:
            busy, late = self.now % self.owners, 0
            ranks ^= 1 << busy
        else:  # the late rank has all sums
            busy, late = -1, 1 << self.owners
        urgent = [(piece, self.urgency(piece), who) for piece, who in self.holders.items()]
        lacks: _Lacks = {}
        for target in range(self.owners):
            if target == busy:
                continue
            due = (target - self.now) % self.owners
            soon = 0.0
            if self.now + due < self.pieces and due <= self.depth:
                soon = self.weights.soon * (self.depth - due + 1)
            mine = [
                (value + soon * (self.now - 1 - piece) + self.noise(), piece)
                for piece, value, who in urgent
                if not who >> target & 1
            ]
            lacks[target] = sorted(mine, reverse=True)
        sources = {piece: who & ranks | late for piece, who in self.holders.items()}
        match = _Match(lacks, sources)
        order = [
            (weight, target, piece) for target, mine in lacks.items() for weight, piece in mine
        ]
        for _, target, piece in sorted(order, reverse=True):
            if target not in match.source_of and (some := sources[piece] & ~match.used):
                match.take(self.one_of(some), target, piece)
        for target in lacks:
            if target not in match.source_of:
                match.augment(target)
        return [(source, target, piece) for target, (source, piece) in match.source_of.items()]

    def noise(self) -> float:
        return self.weights.noise * self.rng.random()

    def one_of(self, some: int) -> int:
        """Return one of the ranks that are bits of `some`: the next one from a random rank on."""
        start = self.rng.randrange(self.owners + 1)
        some = some >> start << start or some
        return (some & -some).bit_length() - 1


class _Match:
    """A match pairs the ranks of a round: `source_of[target]` is the source and the piece.

    `lacks`: by target, the pieces that it may receive, the most urgent first, with their weights.
    `sources`: by piece, the ranks that can send it, as bits.
    """

    def __init__(self, lacks: _Lacks, sources: Mapping[int, int]) -> None:
        self.lacks, self.sources = lacks, sources
        self.source_of: dict[int, tuple[int, int]] = {}
        self.target_of: dict[int, int] = {}
        self.used = 0  # the sources that send, as bits

    def take(self, source: int, target: int, piece: int) -> None:
        self.source_of[target], self.target_of[source] = (source, piece), target
        self.used |= 1 << source

    def augment(self, target: int) -> None:
        """Let `target` receive, too, if others can receive from other sources instead."""
        self._augment(target, 0)

    def _augment(self, target: int, seen: int) -> int:
        """Return the sources looked at, and those `seen` before; -1 once a source was found."""
        for _, piece in self.lacks[target]:
            while some := self.sources[piece] & ~seen:
                source = (some & -some).bit_length() - 1
                seen |= 1 << source
                if source in self.target_of:
                    seen = self._augment(self.target_of[source], seen)
                if source not in self.target_of or seen < 0:
                    self.take(source, target, piece)
                    return -1
        return seen
