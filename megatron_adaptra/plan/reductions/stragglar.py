"""StragglAR (arXiv 2505.23523): the others reduce-scatter while one rank is late."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.collective import CollectiveLine, CollectiveOp, CollectivePlan
from megatron_adaptra.plan.reductions.builders import add, part, take, total, whole
from megatron_adaptra.plan.reductions.stragglar_rounds import (
    Copy,
    Rounds,
    power_of_two_rounds,
    searched_rounds,
)


def stragglar(ranks: int, late: int, k: int = 1) -> CollectivePlan:
    """An all-reduce of which the `late` rank only does the last rounds, about one buffer's time.

    Args:
        ranks: how many, N; at least 4.
        late: the rank that is late.
        k: pieces of each owner, at least 1. All but the late rank are owners, so that the buffer
            is cut into k (N - 1) equal pieces.

    Raises BadInput.
    """
    whole("ranks", ranks, 4)
    whole("k", k, 1)
    if isinstance(late, bool) or not isinstance(late, int) or not 0 <= late < ranks:
        raise BadInput("late rank", late, f"ranks are 0 to {ranks - 1}")
    return _stragglar(ranks, late, k)


@lru_cache(maxsize=64)
def _stragglar(ranks: int, late: int, k: int) -> CollectivePlan:
    rounds = _rounds(ranks, k)
    others = [rank for rank in range(ranks) if rank != late]
    pieces = k * len(others)
    lines = dict(zip(others, _reduce_scatter(others, pieces), strict=True))
    lines[late] = []
    for now, copies in enumerate(rounds):
        _round(lines, now, copies, [*others, late], pieces)
    order: tuple[CollectiveLine, ...] = tuple(tuple(lines[rank]) for rank in range(ranks))
    why = f"rank {late} is late: {len(rounds)} rounds after its arrival"
    return CollectivePlan(order, (1,) * pieces, "stragglar", why)


@lru_cache(maxsize=64)
def _rounds(ranks: int, k: int) -> Rounds:
    """The same for any late rank: their ranks are places, of which the late rank has the last."""
    simple = k == 1 and ranks & (ranks - 1) == 0
    return power_of_two_rounds(ranks) if simple else searched_rounds(ranks, k)


def _reduce_scatter(others: Sequence[int], pieces: int) -> Iterator[list[CollectiveOp]]:
    """Each owner has its pieces' sums over all owners; all start with another one."""
    owners = len(others)
    sends = [part(piece, others[piece % owners]) for piece in range(pieces)]
    for number in range(owners):
        turn = [*range(number + 1, owners), *range(number)]
        line = [sends[base + i] for base in range(0, pieces, owners) for i in turn]
        yield line + [add(piece, *others) for piece in range(number, pieces, owners)]


def _round(
    lines: dict[int, list[CollectiveOp]],
    now: int,
    copies: Sequence[Copy],
    places: Sequence[int],
    pieces: int,
) -> None:
    """Sends come first, so that no rank waits for a round of its own."""
    late, owner = places[-1], places[now % (len(places) - 1)]
    if now < pieces:
        lines[owner].append(part(now, late))
        lines[late].append(part(now, owner))
    for source, target, piece in copies:
        lines[places[source]].append(total(piece, places[target]))
    if now < pieces:
        lines[owner].append(add(now, owner, late))
        lines[late].append(add(now, owner, late))
    for source, target, piece in copies:
        lines[places[target]].append(take(piece, places[source]))
