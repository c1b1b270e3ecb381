"""Whole numbers of microbatches for workers of unequal speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace


def even_shares(costs: Sequence[Callable[[int], float]], count: int) -> list[int]:
    """Numbers that add up to `count` and whose greatest cost is the least there is.

    Args:
        costs: per worker, seconds of so many microbatches; it grows with their number, and is
            infinite for a worker that is to have none.
        count: microbatches in all.
    """
    shares = [0] * len(costs)
    heap = [(cost(1), i) for i, cost in enumerate(costs)]
    heapify(heap)
    for _ in range(count):
        _, i = heap[0]
        shares[i] += 1
        heapreplace(heap, (costs[i](shares[i] + 1), i))
    return shares
