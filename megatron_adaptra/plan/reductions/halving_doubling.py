"""Recursive halving and doubling (Thakur, Rabenseifner, Gropp 2005), for any number of ranks."""

from __future__ import annotations

from functools import lru_cache

from megatron_adaptra.ir.collective import CollectiveOp, CollectivePlan
from megatron_adaptra.plan.reductions.arguments import add, part, take, total, whole


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
