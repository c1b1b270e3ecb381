"""StragglAR (arXiv 2505.23523): the others reduce-scatter while one late rank is away.

After its arrival the late rank swaps one chunk per round with the owner of that chunk, and the sum
is copied from rank to rank, to twice as many in each round, while the next chunks are swapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from random import Random

from megatron_adaptra.errors import BadInput
from megatron_adaptra.ir.collective import CollectiveOp, CollectivePlan
from megatron_adaptra.plan.collectives.arguments import add, part, take, total, whole
from megatron_adaptra.plan.collectives.stragglar_rounds import Copy, doubling_rounds

_TRIES = 24  # of the search, with other random orders; the fewest rounds are kept


def stragglar(ranks: int, late: int, k: int = 1) -> CollectivePlan:
    """An all-reduce of `ranks`, at least 4, of which rank `late` comes last.

    `k`: chunks per owner; all ranks but the late one own as many. Raises BadInput.
    """
    whole("ranks", ranks, 4)
    whole("k", k, 1)
    if isinstance(late, bool) or not isinstance(late, int) or not 0 <= late < ranks:
        raise BadInput("late rank", late, f"ranks are 0 to {ranks - 1}")
    others = [rank for rank in range(ranks) if rank != late]
    plan, count = _plan(ranks, k)
    return plan.relabelled([*others, late], f"rank {late} is late; {count} rounds after it arrives")


def least_rounds(ranks: int, k: int) -> int:
    """Rounds that no plan of so many `ranks` and `k` beats.

    k(N - 1) chunks leave the late rank; the last one then has to double.
    """
    return k * (ranks - 1) + (ranks - 1).bit_length() - 1


@lru_cache(maxsize=64)
def _plan(ranks: int, k: int) -> tuple[CollectivePlan, int]:
    """With the last rank late; and its rounds."""
    early = ranks - 1
    chunks = k * early
    rounds = copies(ranks, k)
    lines: list[list[CollectiveOp]] = [[] for _ in range(ranks)]
    for rank in range(early):
        turn = sorted(range(chunks), key=lambda c: (c // early, (c - rank) % early))
        lines[rank] += [part(c, c % early) for c in turn if c % early != rank]
        lines[rank] += [add(c, *range(early)) for c in range(rank, chunks, early)]
    for c, copied in enumerate(rounds):
        if c < chunks:
            for one, other in ((c % early, early), (early, c % early)):
                lines[one] += [part(c, other), add(c, c % early, early)]
        for source, target, chunk in copied:
            lines[source].append(total(chunk, target))
        for source, target, chunk in copied:
            lines[target].append(take(chunk, source))
    order = tuple(tuple(line) for line in lines)
    return CollectivePlan(order, (1,) * chunks, "stragglar"), len(rounds)


def copies(ranks: int, k: int) -> Sequence[Sequence[Copy]]:
    """Per round, which sums are copied among so many `ranks`, with `k` chunks per owner.

    Powers of two at k = 1 follow the rule of the paper; others are the shortest of a bounded
    number of tries.
    """
    if k == 1 and not ranks & (ranks - 1):
        return doubling_rounds(ranks)
    tries = _TRIES if ranks <= 32 else 1
    best: Sequence[Sequence[Copy]] = ()
    for seed in range(tries):
        found = _search(ranks, k, Random(seed))
        if not best or len(found) < len(best):
            best = found
        if len(best) == least_rounds(ranks, k):
            break
    return best


def _search(ranks: int, k: int, rng: Random) -> list[list[Copy]]:
    early, depth = ranks - 1, (ranks - 1).bit_length()
    chunks = k * early
    holders: list[set[int]] = [set() for _ in range(chunks)]
    rounds: list[list[Copy]] = []
    done = 0
    while done < chunks or any(len(h) < ranks for h in holders):
        now = len(rounds)
        busy = {now % early, early} if now < chunks else set()
        copied: list[Copy] = []
        senders, receivers = set(range(ranks)) - busy, set(range(ranks)) - busy

        def due(rank: int, now: int = now) -> int:
            """In how many rounds it swaps next."""
            wait = (rank - now) % early or early
            return wait if rank < early and now + wait < chunks else depth

        for c in range(min(now, chunks)):  # the oldest first
            if len(holders[c]) == ranks:
                continue
            able = sorted(holders[c] & senders, key=lambda r: (due(r), rng.random()))
            want = [r for r in receivers if r not in holders[c]]
            age = now - c - 1
            last = age + 1 >= depth
            want.sort(key=lambda r: (not last and due(r) + age < depth, due(r), rng.random()))
            for source, target in zip(able, want, strict=False):
                senders.discard(source)
                receivers.discard(target)
                copied.append((source, target, c))
        for _, target, c in copied:
            holders[c].add(target)
        if now < chunks:
            holders[now] |= {now % early, early}
            done += 1
        rounds.append(copied)
    return rounds
