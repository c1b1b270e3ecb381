"""Rounds of StragglAR (arXiv 2505.23523, version 2): who copies which sum to whom, round by round.

In round t the late rank, which is the last one, and owner t mod (N - 1) exchange piece t, so that
both have its sum. All other ranks copy sums meanwhile: each sends at most one piece in a round,
and receives at most one.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["Copy", "Rounds", "power_of_two_rounds"]

Copy = tuple[int, int, int]  # source, target, piece
Rounds = list[list[Copy]]


def power_of_two_rounds(ranks: int) -> Rounds:
    """N - 2 + log2 N rounds of copies for N `ranks`, a power of two of at least 4; one piece each.

    Each rank but the late one holds one active piece: one that not all have. The oldest has N/2
    holders. Each of them, but for the owner of the round, is paired with a rank that holds another
    active piece, and they copy both pieces: so the holders of all active pieces double. An owner
    has to hold the oldest piece in its own round: it takes the right piece ahead of that.
    """
    depth = ranks.bit_length() - 1
    last = ranks - 1
    active: dict[int, int] = {}  # rank -> the active piece that it holds
    empty = iter(range(2 * depth - 1, last))
    rounds: Rounds = []
    for now in range(last + depth - 1):
        copies = list(_first(now, depth, active, empty) if now < depth else ())
        if now >= depth:
            copies = _exchanged(now, now - depth, depth, last, active)
        rounds.append(copies)
        if now < last:
            active[now] = now
    return rounds


def _first(now: int, depth: int, active: dict[int, int], empty: Iterator[int]) -> Iterator[Copy]:
    """All holders copy to ranks that have none; owners that are soon busy get the piece in time."""
    for source, piece in sorted(active.items()):
        target = piece + depth if piece == now - 1 else next(empty)
        active[target] = piece
        yield source, target, piece


def _exchanged(now: int, oldest: int, depth: int, last: int, active: dict[int, int]) -> list[Copy]:
    free = [rank for rank in sorted(active) if active[rank] == oldest and rank != now]
    soon = [rank for rank in free if now < rank < min(now + depth, last)]
    holders: dict[int, list[int]] = {}
    for rank in sorted(active, reverse=True):
        if active[rank] != oldest:
            holders.setdefault(active[rank], []).append(rank)
    pairs = [(rank, holders[rank - depth].pop()) for rank in soon]
    rest = [rank for piece in sorted(holders) for rank in reversed(holders[piece])]
    others = [rank for rank in free if rank not in soon]
    pairs += zip(others, rest, strict=False)
    copies: list[Copy] = []
    for rank, holder in pairs:
        copies += [(rank, holder, oldest), (holder, rank, active[holder])]
        active[rank] = active[holder]
    if now >= last and len(others) > len(rest):  # the late rank has the last piece as well
        copies.append((last, others[-1], last - 1))
        active[others[-1]] = last - 1
    return copies
