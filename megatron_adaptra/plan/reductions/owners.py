"""The shares of the buffer that ranks own in `direct`, by their lateness and their ports.

An owner sends what it owns N - 1 times, as sums, and the rest once, as its part. So a rank that is
late, or whose port is slow, owns less. Ranks that are alike own alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median_low

from megatron_adaptra.ir.conditions import HEALTHY
from megatron_adaptra.sim.ports import Ports

FULL = 16  # the largest share: others are so many parts of it
_LATE = 1 / 16  # buffers of lateness between ranks that are alike, ...
_ALIKE = math.log(1.1)  # ... and the logarithm of the ratio of their rates
_VERY = 1.0  # buffers after the first rank from which on a late one must own nothing, ...
_LAST = 0.25  # ... if it comes less than so many before the last one
_FACTORS = (0.0, 0.5, 0.75, 1.25, 1.5)  # by which the share of a kind of ranks is changed


def very_late(buffer: float, lateness: Sequence[float]) -> tuple[int, ...]:
    """Return the ranks that must own nothing: their shares would come last of all, or later.

    One that comes well before the last rank has time for its share, however late it is.

    Args:
        buffer: seconds of the whole buffer through an ordinary port.
        lateness: seconds, by rank.
    """
    first, last = min(lateness), max(lateness)
    return tuple(
        rank
        for rank, late in enumerate(lateness)
        if late - first > _VERY * buffer and last - late < _LAST * buffer
    )


def kinds(buffer: float, ports: Ports, lateness: Sequence[float]) -> list[int]:
    """Return, by rank, the number of its kind, whose ranks are alike. The largest is kind 0.

    Args:
        buffer: seconds of the whole buffer through an ordinary port.
        ports: of all ranks.
        lateness: seconds, by rank.
    """
    sides = ports.out, ports.into
    middle = [median_low(side) for side in sides]
    ends = {rank for way, path in ports.paths.items() if path != HEALTHY for rank in way}
    found: list[tuple[object, ...]] = []
    for rank, late in enumerate(lateness):
        rates = (_steps(side[rank], rate) for side, rate in zip(sides, middle, strict=True))
        place = round(late / (_LATE * buffer)) if buffer else 0
        found.append((place, *rates, rank in ends))
    by_size = sorted(dict.fromkeys(found), key=lambda kind: (-found.count(kind), kind))
    return [by_size.index(kind) for kind in found]


def _steps(rate: float, middle: float) -> int:
    return 0 if rate == middle else round(math.log(rate / middle) / _ALIKE)


def first_shares(
    buffer: float, ports: Ports, lateness: Sequence[float]
) -> Iterator[tuple[int, ...]]:
    """Yield shares to begin with, the best guess first: by the ports, and without the latest.

    `buffer`, `ports`, `lateness`: as for `kinds`.
    """
    ranks = len(lateness)
    worth = [min(out, into) for out, into in zip(ports.out, ports.into, strict=True)]
    # The rates of an owner's ports beside its own part.
    slowest, most = min(worth), max(worth)
    spare = [rate - slowest if slowest < most else rate for rate in worth]
    order = sorted(range(ranks), key=lambda rank: (-lateness[rank], rank))
    for left_out in range(ranks - 1):
        late = set(order[:left_out])
        if left_out and lateness[order[left_out - 1]] <= _LATE * buffer:
            break
        for rates in (worth, spare):
            weights = [0.0 if r in late else rates[r] for r in range(ranks)]
            if any(weights):  # those in time may all be as slow as the slowest
                yield whole_shares(weights)
    ends = {rank for way, path in ports.paths.items() if path != HEALTHY for rank in way}
    if 0 < len(ends) < ranks:
        yield whole_shares([0.0 if rank in ends else worth[rank] for rank in range(ranks)])


def whole_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the `weights`, some above 0, as whole numbers up to FULL."""
    most = max(weights)
    return tuple(round(FULL * weight / most) for weight in weights)


def changed(shares: Sequence[int], of: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield shares that differ from `shares` in those of one kind of ranks.

    `of`: by rank, the number of its kind.
    """
    for kind in range(1, max(of) + 1):
        mine = [share for share, k in zip(shares, of, strict=True) if k == kind]
        base = max(mine) or FULL // 4
        for factor in _FACTORS:
            weights = [
                factor * base if k == kind else share for share, k in zip(shares, of, strict=True)
            ]
            if any(weights):
                yield whole_shares(weights)
