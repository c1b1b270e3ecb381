"""Reduce-scatters and all-gathers of equal shards, as the distributed optimizer (ZeRO-1) has them.

Shards are Megatron's: a late rank owns one like all others. After it has come it sends (N - 1)/N of
the buffer under any plan, a ring among them. What a plan can save is delays: a ring's bytes cross N
- 1 of them, one after another, those that go straight to their shard's rank one.
"""

from __future__ import annotations

from functools import lru_cache

from megatron_adaptra.ir.collective import CollectiveOp, CollectivePlan, Goal
from megatron_adaptra.plan.reductions.arguments import add, part, take, total, whole


@lru_cache(maxsize=64, typed=True)
def direct_reduce_scatter(ranks: int, pieces: int = 1) -> CollectivePlan:
    """Each of `ranks` sends each other one the part of its shard, at once, in so many `pieces`.

    Parts are added in the order of ranks. Raises BadInput.
    """
    order = []
    for rank in _ranks(ranks, pieces):
        line = [
            part(shard * pieces + i, shard)
            for i in range(pieces)
            for shard in _others(rank, ranks)  # from the next one on: no two start with one
        ]
        if ranks > 1:
            line += [add(rank * pieces + i, *range(ranks)) for i in range(pieces)]
        order.append(line)
    return _plan(order, pieces, "direct", Goal.REDUCE_SCATTER)


@lru_cache(maxsize=64, typed=True)
def direct_all_gather(ranks: int, pieces: int = 1) -> CollectivePlan:
    """Each of `ranks` sends its shard to all others at once, in so many `pieces`.

    Raises BadInput.
    """
    order = []
    for rank in _ranks(ranks, pieces):
        others = _others(rank, ranks)
        line = [total(rank * pieces + i, *others) for i in range(pieces) if others]
        line += [
            take(source * pieces + i, source)
            for i in range(pieces)
            for source in reversed(others)  # who sends to this rank first comes first
        ]
        order.append(line)
    return _plan(order, pieces, "direct", Goal.ALL_GATHER)


@lru_cache(maxsize=64, typed=True)
def ring_reduce_scatter(ranks: int, cut: int = 4) -> CollectivePlan:
    """The first half of a ring: partial sums go around `ranks`, and end where their shard is.

    Shards are cut into `cut` pieces, so that a delay overlaps with other pieces. Raises BadInput.
    """
    order = []
    for rank in _ranks(ranks, cut):
        before, after = (rank - 1) % ranks, (rank + 1) % ranks
        line = [part(piece, after) for piece in _shard(rank - 1, ranks, cut) if ranks > 1]
        for step in range(2, ranks + 1):
            for piece in _shard(rank - step, ranks, cut):
                line.append(add(piece, before, rank))
                if step < ranks:
                    line.append(part(piece, after))
        order.append(line)
    return _plan(order, cut, "ring", Goal.REDUCE_SCATTER)


@lru_cache(maxsize=64, typed=True)
def ring_all_gather(ranks: int, cut: int = 4) -> CollectivePlan:
    """The second half of a ring: shards go around `ranks`, each cut into `cut` pieces.

    Raises BadInput.
    """
    order = []
    for rank in _ranks(ranks, cut):
        before, after = (rank - 1) % ranks, (rank + 1) % ranks
        line = [total(piece, after) for piece in _shard(rank, ranks, cut) if ranks > 1]
        for step in range(1, ranks):
            for piece in _shard(rank - step, ranks, cut):
                line.append(take(piece, before))
                if step < ranks - 1:
                    line.append(total(piece, after))
        order.append(line)
    return _plan(order, cut, "ring", Goal.ALL_GATHER)


def _ranks(ranks: int, pieces: int) -> range:
    """All ranks, once the arguments are known to be sound."""
    whole("pieces", pieces, 1)
    return range(whole("ranks", ranks, 1))


def _others(rank: int, ranks: int) -> list[int]:
    return [(rank + i) % ranks for i in range(1, ranks)]


def _shard(shard: int, ranks: int, cut: int) -> range:
    return range(shard % ranks * cut, shard % ranks * cut + cut)


def _plan(order: list[list[CollectiveOp]], pieces: int, name: str, goal: Goal) -> CollectivePlan:
    lines = tuple(tuple(line) for line in order)
    why = f"shards cut in {pieces}" if pieces > 1 else "whole shards"
    return CollectivePlan(lines, (1,) * (len(lines) * pieces), name, why, goal)
