"""No all-reduce ends before this, whatever its plan: what must cross the ranks' ports."""

from __future__ import annotations

from collections.abc import Sequence


def all_reduce_bound(
    nbytes: int,
    out: Sequence[float],
    into: Sequence[float],
    arrivals: Sequence[float],
    delay: float,
) -> float:
    """Seconds from the arrival of the last rank to the end of the last one, at least.

    Of each byte every rank sends at least its own part or the sum, after it has come; it receives
    at least the others' sum or all of it, once another one has come. N ranks need N - 1 transfers
    of a byte until its sum is known, and N - 1 until all have it, of which the last N - 1 are
    after the last rank has come.

    Args:
        nbytes: of the buffer.
        out, into: bytes per second that each rank can send, and receive, in all.
        arrivals: seconds at which each rank comes.
        delay: seconds from a rank to another one.
    """
    ranks, last = len(arrivals), max(arrivals)
    if ranks < 2 or not nbytes:
        return 0.0
    ends = [last]
    for rank, came in enumerate(arrivals):
        others = min(moment for other, moment in enumerate(arrivals) if other != rank)
        ends.append(came + nbytes / out[rank] + delay)
        ends.append(others + nbytes / into[rank] + delay)
    for rates in (out, into):
        ends.append(min(arrivals) + 2 * (ranks - 1) * nbytes / sum(rates) + delay)
        ends.append(last + (ranks - 1) * nbytes / sum(rates) + delay)
    return max(ends) - last
