"""A chain of ranks, sorted by when they arrive (the linear tree of Proficz 2018, pipelined)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.collective import CollectiveLine, CollectivePlan
from megatron_adaptra.plan.reductions.arguments import add, part, take, total, whole


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
