"""A covering selection: every pair of values that can go together is in some row of it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]


def rows(axes: Mapping[str, Sequence[Any]], possible: Callable[[Row], bool]) -> Iterator[Row]:
    """All combinations of values, one per axis, that are possible."""
    for values in product(*axes.values()):
        row = dict(zip(axes, values, strict=True))
        if possible(row):
            yield row


def pairs(row: Row) -> set[Hashable]:
    """What of a row meets: two values of different axes. All of its values must be hashable."""
    return set(combinations(row.items(), 2))


def covering(axes: Mapping[str, Sequence[Any]], possible: Callable[[Row], bool]) -> list[Row]:
    """`cover` of `rows`."""
    return cover(list(rows(axes, possible)))


def cover(every: Sequence[Row], met: Callable[[Row], set[Hashable]] = pairs) -> list[Row]:
    """Some of these rows, in their order, with all that any of them has `met`. Deterministic.

    Greedy: the row with most pairs that are still to be met comes next, and of several the first.
    """
    missing = set().union(*map(met, every)) if every else set()
    # What a row adds only gets less, so a row that still adds what it did is the best one.
    heap = [(-len(met(row)), index) for index, row in enumerate(every)]
    heapq.heapify(heap)
    chosen = []
    while missing:
        before, index = heapq.heappop(heap)
        adds = len(met(every[index]) & missing)
        if adds == -before:
            chosen.append(index)
            missing -= met(every[index])
        elif adds:
            heapq.heappush(heap, (-adds, index))
    return [every[index] for index in sorted(chosen)]
