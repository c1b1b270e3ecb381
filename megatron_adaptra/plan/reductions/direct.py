"""Owners: each piece is sent to its owner, who adds and sends the sum to all.

A late rank owns nothing. All it has to do after its arrival is to send its buffer once, while it
receives the sums: about one buffer's time of its port, where a ring takes two. Unequal shares
(those of BytePS, OSDI 2020, by rank) serve several late ranks, a slow port and a slow link.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import gcd

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.collective import CollectivePlan
from megatron_adaptra.plan.reductions.arguments import add, part, take, total, whole

_FINE = 64  # an owner's share is cut into pieces that are equal up to a part in so many


def direct(shares: Sequence[int], pieces: int = 16) -> CollectivePlan:
    """`shares[i]` is how much of the buffer rank i owns, of their sum; 0 for a late rank.

    `pieces`: of the largest owner; others have as many as makes them of about the same size. All
    parts are added in the order of ranks, so that the bits are the same under all shares. Raises
    BadInput.
    """
    for share in shares:  # here: to a cache True is 1
        whole("share", share, 0)
    whole("pieces", pieces, 1)
    return _direct(tuple(shares), pieces)


def shares_without(ranks: int, late: Sequence[int]) -> tuple[int, ...]:
    """Equal shares of so many `ranks`, and none for those that are `late`. Raises BadInput."""
    whole("ranks", ranks, 1)
    for rank in late:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < ranks:
            raise BadInput("late rank", rank, f"ranks are 0 to {ranks - 1}")
    if len(set(late)) == ranks:
        raise BadInput("late ranks", list(late), "at least one rank has to own a share")
    return tuple(int(rank not in late) for rank in range(ranks))


@lru_cache(maxsize=64)
def _direct(shares: tuple[int, ...], pieces: int) -> CollectivePlan:
    if not any(shares):
        raise BadInput("shares", list(shares), "at least one above 0")
    ranks = len(shares)
    weights, owned = _cut(shares, pieces)
    owners: list[int] = []
    for rank, count in enumerate(owned):
        owners += [rank] * count
    first = [owners.index(rank) if owned[rank] else 0 for rank in range(ranks)]
    places = [(i - first[owner] + 0.5) / owned[owner] for i, owner in enumerate(owners)]
    all_ranks = tuple(range(ranks))
    order = []
    for rank in range(ranks):
        # In turns over the owners, from the next rank on, so that no two ranks start with one.
        turn = sorted(range(len(owners)), key=lambda i: (places[i], (owners[i] - rank) % ranks))
        others = [i for i in turn if owners[i] != rank]
        targets = all_ranks[rank + 1 :] + all_ranks[:rank]
        line = [part(i, owners[i]) for i in others]
        if targets:
            for i in range(first[rank], first[rank] + owned[rank]):
                line += [add(i, *all_ranks), total(i, *targets)]
        line += [take(i, owners[i]) for i in others]
        order.append(tuple(line))
    idle = [str(rank) for rank, share in enumerate(shares) if not share]
    why = f"nothing is owned by {', '.join(idle)}" if idle else "all own a share"
    return CollectivePlan(tuple(order), weights, "direct", why)


def _cut(shares: Sequence[int], pieces: int) -> tuple[tuple[int, ...], list[int]]:
    """The weights of all pieces, owner by owner, and how many pieces each rank owns."""
    most = max(shares)
    owned = [max(1, round(pieces * share / most)) if share else 0 for share in shares]
    weights: list[int] = []
    for share, count in zip(shares, owned, strict=True):
        size = share * pieces * _FINE
        ends = [size * i // count for i in range(count + 1)] if count else []
        weights += [b - a for a, b in pairwise(ends)]
    divisor = gcd(*weights)
    return tuple(weight // divisor for weight in weights), owned
