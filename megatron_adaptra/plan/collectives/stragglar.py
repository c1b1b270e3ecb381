"""StragglAR (arXiv 2505.23523): the others reduce-scatter while one rank is late."""

from __future__ import annotations

from functools import lru_cache

from megatron_adaptra.errors import BadInput
from megatron_adaptra.ir.collective import CollectiveLine, CollectiveOp, CollectivePlan
from megatron_adaptra.plan.collectives.arguments import add, part, take, total, whole
from megatron_adaptra.plan.collectives.stragglar_rounds import Copy, power_of_two_rounds
from megatron_adaptra.plan.collectives.stragglar_search import searched_rounds

CHUNKS = 4  # pieces per owner: more of them double sooner at the end, and cost more messages


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
    if late == ranks - 1:
        return _of_last(ranks, k)
    places = list(range(ranks))
    places[late], places[-1] = ranks - 1, late
    plan = _stragglar(ranks, ranks - 1, k)
    return plan.relabelled(places, plan.why.replace(f"rank {ranks - 1}", f"rank {late}"))


def _of_last(ranks: int, k: int) -> CollectivePlan:
    """The plan of which the last rank is late."""
    owners = ranks - 1
    pieces = k * owners
    simple = k == 1 and ranks & owners == 0
    rounds = power_of_two_rounds(ranks) if simple else searched_rounds(ranks, k)
    lines = [_reduce_scatter(rank, owners, pieces) for rank in range(owners)] + [[]]
    for now, copies in enumerate(rounds):
        _round(lines, now, copies, owners, pieces)
    order: tuple[CollectiveLine, ...] = tuple(map(tuple, lines))
    why = f"rank {owners} is late: {len(rounds)} rounds after its arrival"
    return CollectivePlan(order, (1,) * pieces, "stragglar", why)


def _reduce_scatter(rank: int, owners: int, pieces: int) -> list[CollectiveOp]:
    """Each owner has its pieces' sums over all owners; all start with another one."""
    line = [
        part(piece, (rank + step) % owners)
        for base in range(0, pieces, owners)
        for step in range(1, owners)
        for piece in [base + (rank + step) % owners]
    ]
    return line + [add(piece, *range(owners)) for piece in range(rank, pieces, owners)]


def _round(
    lines: list[list[CollectiveOp]], now: int, copies: list[Copy], owners: int, pieces: int
) -> None:
    """Sends come first, so that no rank waits for a round of its own."""
    late, owner = owners, now % owners
    if now < pieces:
        lines[owner].append(part(now, late))
        lines[late].append(part(now, owner))
    for source, target, piece in copies:
        lines[source].append(total(piece, target))
    if now < pieces:
        lines[owner].append(add(now, owner, late))
        lines[late].append(add(now, owner, late))
    for source, target, piece in copies:
        lines[target].append(take(piece, source))
