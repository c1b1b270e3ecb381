"""The builders of collective plans: all-reduces, and their halves for equal shards.

- *ring* (Patarasuk, Yuan 2009), with chunks cut into pieces that follow each other.
- *sorted chain*: ranks sorted by when they arrive (the linear tree of Proficz 2018, pipelined).
- *halving-doubling* (Thakur, Rabenseifner, Gropp 2005), for any number of ranks.
- *direct*: each piece is sent to its owner, who adds and sends the sum to all. A late rank owns
  nothing. All it has to do after its arrival is to send its buffer once, while it receives the
  sums: about one buffer's time of its port, where a ring takes two. Unequal shares (those of
  BytePS, OSDI 2020, by rank) serve several late ranks, a slow port and a slow link.

Reduce-scatters and all-gathers are of equal shards, as the distributed optimizer (ZeRO-1) has them.
Shards are Megatron's: a late rank owns one like all others. After it has come it sends (N - 1)/N of
the buffer under any plan, a ring among them. What a plan can save is delays: a ring's bytes cross N
- 1 of them, one after another, those that go straight to their shard's rank one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from math import gcd

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.collective import (
    Action,
    CollectiveLine,
    CollectiveOp,
    CollectivePlan,
    Goal,
)

_FINE = 64  # an owner's share is cut into pieces that are equal up to a part in so many


def whole(name: str, value: object, least: int) -> int:
    """Return `value` if it is a whole number of at least `least`; else raise BadInput of `name`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadInput(name, value, f"it has to be a whole number of at least {least}")
    return value


def part(piece: int, *targets: int, length: int = 1) -> CollectiveOp:
    """Send what is held of `length` pieces from `piece` on to `targets`, to be added."""
    return CollectiveOp(Action.PART, piece, targets, length)


def add(piece: int, *ranks: int, length: int = 1) -> CollectiveOp:
    """Add what `ranks`, of whom this is one, hold of `length` pieces from `piece` on."""
    return CollectiveOp(Action.ADD, piece, ranks, length)


def total(piece: int, *targets: int, length: int = 1) -> CollectiveOp:
    """Send the sums of `length` pieces from `piece` on to `targets`."""
    return CollectiveOp(Action.SUM, piece, targets, length)


def take(piece: int, source: int, length: int = 1) -> CollectiveOp:
    """Receive the sums of `length` pieces from `piece` on from `source`."""
    return CollectiveOp(Action.TAKE, piece, (source,), length)


@lru_cache(maxsize=64, typed=True)
def ring(ranks: int, cut: int = 4) -> CollectivePlan:
    """`ranks` chunks, each cut into `cut` pieces, so that a delay overlaps with other pieces.

    Each rank sends to the next one. Chunk c is added from rank c on around the ring, and its sum
    goes around from the rank before c. Raises BadInput.
    """
    whole("ranks", ranks, 1)
    whole("cut", cut, 1)
    order = tuple(tuple(_ring_line(rank, ranks, cut, Goal.ALL_REDUCE)) for rank in range(ranks))
    why = f"chunks cut in {cut}" if ranks > 1 else "one rank has the sum"
    return CollectivePlan(order, (1,) * (ranks * cut), "ring", why)


@lru_cache(maxsize=64, typed=True)
def ring_reduce_scatter(ranks: int, cut: int = 4) -> CollectivePlan:
    """The first half of a ring: partial sums go around `ranks`, and end where their shard is.

    Shards are cut into `cut` pieces, so that a delay overlaps with other pieces. Raises BadInput.
    """
    order = [_ring_line(rank, ranks, cut, Goal.REDUCE_SCATTER) for rank in _ranks(ranks, cut)]
    return _of_shards(order, cut, "ring", Goal.REDUCE_SCATTER)


@lru_cache(maxsize=64, typed=True)
def ring_all_gather(ranks: int, cut: int = 4) -> CollectivePlan:
    """The second half of a ring: shards go around `ranks`, each cut into `cut` pieces.

    Raises BadInput.
    """
    order = [_ring_line(rank, ranks, cut, Goal.ALL_GATHER) for rank in _ranks(ranks, cut)]
    return _of_shards(order, cut, "ring", Goal.ALL_GATHER)


def _ring_line(rank: int, ranks: int, cut: int, goal: Goal) -> list[CollectiveOp]:
    """Return a rank's line; shards start one rank later than chunks, so that each ends at home."""
    if ranks == 1:
        return []
    before, after = (rank - 1) % ranks, (rank + 1) % ranks
    adds, gathers = goal is not Goal.ALL_GATHER, goal is not Goal.REDUCE_SCATTER

    def pieces(step: int) -> range:
        first = (rank - (goal is not Goal.ALL_REDUCE) - step) % ranks * cut
        return range(first, first + cut)

    line = [part(i, after) if adds else total(i, after) for i in pieces(0 if adds else -1)]
    for step in range(1, ranks if adds else 1):
        for piece in pieces(step):
            line.append(add(piece, before, rank))
            if step < ranks - 1:
                line.append(part(piece, after))
            elif gathers:
                line.append(total(piece, after))
    for step in range(ranks - 1 if gathers else 0):
        for piece in pieces(step):
            line.append(take(piece, before))
            if step < ranks - 2:
                line.append(total(piece, after))
    return line


def sorted_chain(by_arrival: Sequence[int], pieces: int = 64) -> CollectivePlan:
    """Partial sums go along the chain, `pieces` one after another; sums come back along it.

    `by_arrival`: all ranks, the latest at the end: when it arrives it has all to add that it
    needs. Raises BadInput.
    """
    ranks = len(by_arrival)
    whole("pieces", pieces, 1)
    if not ranks or sorted(by_arrival) != list(range(ranks)):
        raise BadInput("ranks by arrival", list(by_arrival), "each rank of 0 to N - 1 once")
    lines: dict[int, CollectiveLine] = {}
    for place, rank in enumerate(by_arrival):
        up, down = [], []
        for piece in range(pieces):
            if place:
                up.append(add(piece, by_arrival[place - 1], rank))
            if place < ranks - 1:
                up.append(part(piece, by_arrival[place + 1]))
                down.append(take(piece, by_arrival[place + 1]))
            if place:
                (down if place < ranks - 1 else up).append(total(piece, by_arrival[place - 1]))
        lines[rank] = (*up, *down)
    order = tuple(lines[rank] for rank in range(ranks))
    why = f"rank {by_arrival[-1]} adds last"
    return CollectivePlan(order, (1,) * pieces, "sorted-chain", why)


@lru_cache(maxsize=64, typed=True)
def halving_doubling(ranks: int) -> CollectivePlan:
    """Return a plan of few messages: ranks exchange halves with partners, then gather back.

    `ranks`: how many. Beyond the largest power of two, each rank first gives all it has to a
    partner among the others, and receives the sums from it at the end, piece by piece. Raises
    BadInput.
    """
    whole("ranks", ranks, 1)
    core = 1 << (ranks.bit_length() - 1)
    surplus = ranks - core
    order = []
    for rank in range(ranks):
        if rank >= core:
            partner = rank - core
            line = [part(piece, partner) for piece in range(core)]
            line += [take(piece, partner) for piece in _gathered(partner, core)]
        else:
            extra = core + rank if rank < surplus else None
            line = _core_line(rank, core, extra)
        order.append(tuple(line))
    why = "a power of two" if not surplus else f"{surplus} ranks have a partner among {core}"
    return CollectivePlan(tuple(order), (1,) * core, "halving-doubling", why)


def _core_line(rank: int, core: int, extra: int | None) -> list[CollectiveOp]:
    """Return the line of a rank below `core`; `extra`: the rank that it stands for too, or None."""
    line: list[CollectiveOp] = []
    if extra is not None:
        line += [add(piece, rank, extra) for piece in range(core)]
    steps = []
    first, length = 0, core
    while length > 1:
        length //= 2
        partner = rank ^ length
        mine, other = first, first + length
        if rank & length:
            mine, other = other, mine
        line.append(part(other, partner, length=length))
        line.append(add(mine, *sorted((rank, partner)), length=length))
        steps.append((mine, other, length, partner))
        first = mine
    if extra is not None:
        line.append(total(rank, extra))
    for mine, other, length, partner in reversed(steps):
        line.append(total(mine, partner, length=length))
        line.append(take(other, partner, length))
        if extra is not None:
            line += [total(piece, extra) for piece in range(other, other + length)]
    return line


def _gathered(rank: int, core: int) -> list[int]:
    """Return the pieces in the order in which `rank` gets their sums."""
    pieces, length = [rank], 1
    while length < core:
        first = (rank ^ length) // length * length
        pieces += range(first, first + length)
        length *= 2
    return pieces


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
    return _of_shards(order, pieces, "direct", Goal.REDUCE_SCATTER)


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
    return _of_shards(order, pieces, "direct", Goal.ALL_GATHER)


def _ranks(ranks: int, pieces: int) -> range:
    """All ranks, once the arguments are known to be sound."""
    whole("pieces", pieces, 1)
    return range(whole("ranks", ranks, 1))


def _others(rank: int, ranks: int) -> list[int]:
    return [(rank + i) % ranks for i in range(1, ranks)]


def _of_shards(
    order: list[list[CollectiveOp]], pieces: int, name: str, goal: Goal
) -> CollectivePlan:
    lines = tuple(tuple(line) for line in order)
    why = f"shards cut in {pieces}" if pieces > 1 else "whole shards"
    return CollectivePlan(lines, (1,) * (len(lines) * pieces), name, why, goal)


SHARD_BUILDERS: Mapping[tuple[Goal, str], Callable[[int, int], CollectivePlan]] = {
    (Goal.REDUCE_SCATTER, "direct"): direct_reduce_scatter,
    (Goal.REDUCE_SCATTER, "ring"): ring_reduce_scatter,
    (Goal.ALL_GATHER, "direct"): direct_all_gather,
    (Goal.ALL_GATHER, "ring"): ring_all_gather,
}


def sharded_plan(goal: Goal, algorithm: str, ranks: int, pieces: int) -> CollectivePlan:
    """The plan of `algorithm` for so many `ranks`, each shard in so many `pieces`.

    `goal`: a reduce-scatter or an all-gather.
    """
    return SHARD_BUILDERS[goal, algorithm](ranks, pieces)
