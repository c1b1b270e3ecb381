"""StragglAR's copies for a power of two of ranks: N - 2 + log2 N rounds (arXiv 2505.23523).

A chunk has twice as many holders after each round. Ranks that swap soon are given the oldest
chunks first, so that what they hold while they swap is with all ranks already.
"""

from __future__ import annotations

Copy = tuple[int, int, int]  # source, target, chunk


def doubling_rounds(ranks: int) -> list[list[Copy]]:
    """Per round, which sums are copied; `ranks` is a power of two, the last one is late."""
    late = ranks - 1
    holders: list[set[int]] = [set() for _ in range(late)]
    rounds: list[list[Copy]] = []
    while len(rounds) < late or any(len(held) < ranks for held in holders):
        rounds.append(_Round(ranks, len(rounds), holders).copies())
        for _, target, chunk in rounds[-1]:
            holders[chunk].add(target)
        if len(rounds) <= late:
            holders[len(rounds) - 1] |= {len(rounds) - 1, late}
    return rounds


class _Round:
    """Pairs of ranks in round `now`; each sends the other its chunk, where that is of use."""

    def __init__(self, ranks: int, now: int, holders: list[set[int]]) -> None:
        self.late, self.now, self.holders = ranks - 1, now, holders
        self.steps = ranks.bit_length() - 1
        self.live = [c for c in range(min(now, self.late)) if len(holders[c]) < ranks]
        self.free = set(range(self.late)) - {now}
        self.found: list[Copy] = []
        self.own: dict[int, int] = {}  # rank -> the chunk that it sends
        if self.tail:
            self.free.add(self.late)
        for chunk in self.live:
            for rank in holders[chunk] & self.free:
                self.own.setdefault(rank, chunk)
        if self.tail:
            self.own[self.late] = self.late - 1

    @property
    def tail(self) -> bool:
        return self.now >= self.late

    def copies(self) -> list[Copy]:
        if self.now < self.steps:
            self.spread()
        else:
            if not self.tail:
                for rank in range(self.now + 1, min(self.now + self.steps, self.late)):
                    self.serve(rank)
            self.finish_oldest()
            if self.late in self.free:  # in the tail alone
                lacking = sorted(self.free - self.holders[self.late - 1])
                if lacking:
                    self.pair(self.late, lacking[0])
        return self.found

    def spread(self) -> None:
        """The first rounds: away from the ranks that swap next."""
        before = self.now - 1
        if before >= 0 and before + self.steps < self.late:
            self.pair(before, before + self.steps)
        far = [r for r in sorted(self.free - self.own.keys()) if r > 2 * (self.steps - 1)]
        for source, target in zip(sorted(self.own.keys() & self.free), far, strict=False):
            self.pair(source, target)

    def serve(self, rank: int) -> None:
        """One that swaps soon gets the oldest chunk that it lacks."""
        if rank not in self.free:
            return
        for chunk in self.live:
            able = [r for r in self.free if self.own.get(r) == chunk]
            if rank not in self.holders[chunk] and able:
                soon = range(self.now + 1, self.now + self.steps)
                self.pair(min(able, key=lambda r: (r in soon, self.has_own_of(rank, r), r)), rank)
                return

    def finish_oldest(self) -> None:
        oldest = self.live[0]
        rest = sorted(self.free - self.holders[oldest])
        for source in sorted(r for r in self.free if self.own.get(r) == oldest):
            if rest:
                target = min(rest, key=lambda r: (self.has_own_of(r, source), r))
                rest.remove(target)
                self.pair(source, target)

    def has_own_of(self, rank: int, other: int) -> bool:
        """Whether `other` has the chunk that `rank` sends."""
        return rank in self.own and other in self.holders[self.own[rank]]

    def pair(self, one: int, other: int) -> None:
        self.free -= {one, other}
        for source, target in ((one, other), (other, one)):
            chunk = self.own.get(source)
            if chunk is not None and target not in self.holders[chunk]:
                self.found.append((source, target, chunk))
