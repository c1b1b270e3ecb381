"""Seconds of all-reduces of which one rank is late, in closed form, for any number of ranks.

The clock of ports (sim/ports.py) runs a plan message by message, of which 1,024 ranks have
millions. These forms need no plan; the number of pieces is chosen by them. All ports are equal. A
message occupies its sender's port for its bytes' time and a cost, and then takes a delay. The forms
are exact for a ring, and for halving-doubling of a power of two; the others are within 20 % of the
clock, and StragglAR, where the rank is late by less than a buffer's time, within 35 %
(tests/unit/sim/test_all_reduce_forms.py), and with pieces of more than a turn within 40 % for up to
16 ranks.

A reduce-scatter and an all-gather of equal shards take equally long. Lateness is in neither of
their forms: after a rank has come, it sends (N - 1)/N of the buffer under any plan, and earlier
work of others saves none of that. They are exact where no rank is late
(tests/unit/sim/test_shard_forms.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from megatron_adaptra.base.errors import BadInput


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce of `nbytes` between so many `ranks`, of which one is late.

    Args:
        ranks: at least 1.
        nbytes: of the buffer.
        rate: bytes per second through each port, in and out.
        delay: seconds from a port to another one.
        cost: seconds of the sender's port for each message.
        late: seconds by which the last rank comes after the others; inf: until they have done all
            that they can do without it.
        turn: bytes that a connection sends before the next one's turn; inf for a whole message. The
            form of StragglAR alone depends on it.

    Raises:
        BadInput: a value is out of range.
    """

    ranks: int
    nbytes: float
    rate: float
    delay: float = 0.0
    cost: float = 0.0
    late: float = 0.0
    turn: float = math.inf

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise BadInput("ranks", self.ranks, "at least 1")
        for name in ("nbytes", "delay", "cost", "late"):
            if not getattr(self, name) >= 0:
                raise BadInput(name, getattr(self, name), "at least 0")
        if not self.rate > 0:
            raise BadInput("rate", self.rate, "bytes per second above 0")
        if not self.turn >= 1:
            raise BadInput("turn", self.turn, "at least 1 byte")

    @property
    def buffer(self) -> float:
        """Seconds that the whole buffer takes through a port."""
        return self.nbytes / self.rate

    def piece(self, pieces: int) -> float:
        """Seconds of the sender's port for a message with one of so many `pieces`."""
        return self.cost + self.buffer / pieces


def least_rounds(ranks: int, k: int) -> int:
    """Return a lower bound on StragglAR's rounds for so many `ranks`, `k` pieces per owner.

    The late rank sends k(N - 1) pieces; the last one is then on two ranks, and at best doubles.
    """
    return k * (ranks - 1) + (ranks - 1).bit_length() - 1


def _ring(job: AllReduce, cut: int) -> float:
    """2(N - 1) steps: a piece goes on once it is there, and its port has sent those before it."""
    piece = job.piece(job.ranks * cut)
    step = max(cut * piece, piece + job.delay)
    return (2 * job.ranks - 3) * step + cut * piece + job.delay


def _halving_doubling(job: AllReduce, _: int) -> float:
    """Ranks beyond a power of two send their buffer to a partner first, and get the sums last."""
    core = 1 << (job.ranks.bit_length() - 1)
    steps = 2 * (core.bit_length() - 1) * (job.cost + job.delay)
    seconds = steps + 2 * (core - 1) / core * job.buffer
    if core < job.ranks:
        seconds += 2 * core * job.cost + job.delay + 2.25 * job.buffer
    return seconds


def _sorted_chain(job: AllReduce, pieces: int) -> float:
    """Sums come back from the late rank; they share ports with what is left of the way there."""
    hops, piece = job.ranks - 1, job.piece(pieces)
    back = (pieces + hops - 1) * piece + hops * job.delay
    both = (2.5 * pieces + 2 * hops) * piece + 2 * hops * job.delay
    left = max(0.0, 1 - job.late / back) if back else 0.0
    return back + (both - back) * left


def _direct(job: AllReduce, pieces: int) -> float:
    """The late rank sends to all owners; each sends its last sum to all others after that."""
    others = job.ranks - 1
    all_pieces = pieces * others
    piece = job.piece(all_pieces)
    alone = (all_pieces + others) * piece + 2 * job.delay
    both = (2 * all_pieces - pieces + 1) * piece + 2 * job.delay
    return max(alone, both - job.late)


def _stragglar(job: AllReduce, k: int) -> float:
    """The rounds, after what is left of the others' reduce-scatter.

    Pieces of more than a turn share the port with those of the next round, and all arrive at its
    end: a round takes about twice as long, three times between 16 ranks.
    """
    pieces = k * (job.ranks - 1)
    piece = job.piece(pieces)
    reduced = (pieces + 1) * piece + 2 * job.delay
    shared = job.buffer / pieces if job.nbytes > job.turn * pieces else 0.0
    rounds = least_rounds(job.ranks, k) * (piece + shared + job.delay)
    return max(0.0, reduced - job.late) + rounds


_FORMS: dict[str, Callable[[AllReduce, int], float]] = {
    "ring": _ring,
    "halving-doubling": _halving_doubling,
    "sorted-chain": _sorted_chain,
    "direct": _direct,
    "stragglar": _stragglar,
}
ALGORITHMS = tuple(_FORMS)
_CUTS = {  # numbers of pieces that are tried
    "ring": (1, 2, 4, 8),
    "halving-doubling": (1,),
    "sorted-chain": tuple(1 << i for i in range(11)),
    "direct": tuple(range(1, 65)),
    "stragglar": tuple(range(1, 33)),
}
# The same per shard; more of a ring took longer (docs/evidence/allreduce.md).
_SHARD_CUTS = {"ring": (1, 2, 4), "direct": (1, 2, 4)}
SHARDED = tuple(_SHARD_CUTS)


def seconds_after_arrival(algorithm: str, job: AllReduce, pieces: int) -> float:
    """Seconds from the arrival of the last rank to the end of the last one.

    Args:
        algorithm: one of ALGORITHMS.
        job: the all-reduce.
        pieces: the `cut` of a ring, `pieces` of a chain and of direct, `k` of StragglAR, which has
            the fewest rounds that there can be; halving-doubling has none.

    Raises:
        BadInput: there is no such algorithm.
    """
    if algorithm not in _FORMS:
        raise BadInput("algorithm", algorithm, f"it has to be one of {', '.join(ALGORITHMS)}")
    return _FORMS[algorithm](job, pieces) if job.ranks > 1 else 0.0


def best_pieces(algorithm: str, job: AllReduce, most: float = math.inf) -> int:
    """Return the number of pieces with which the `algorithm` is fastest; the fewest of equals.

    More pieces overlap better, and cost more messages. `most`: no more than so many. The other
    arguments, and BadInput: as of `seconds_after_arrival`.
    """
    cuts = [cut for cut in _CUTS.get(algorithm, ()) if cut <= most] or [1]
    return min(cuts, key=lambda cut: (seconds_after_arrival(algorithm, job, cut), cut))


def shard_seconds(algorithm: str, job: AllReduce, pieces: int) -> float:
    """Seconds from the arrival of the last rank to the end of the last one.

    Args:
        algorithm: one of SHARDED.
        job: its ranks, buffer and ports.
        pieces: into which each shard is cut.

    Raises:
        BadInput: there is no such algorithm.
    """
    if algorithm not in SHARDED:
        raise BadInput("algorithm", algorithm, f"it has to be one of {', '.join(SHARDED)}")
    if job.ranks == 1:
        return 0.0
    piece = job.piece(job.ranks * pieces)
    if algorithm == "direct":
        return (job.ranks - 1) * pieces * piece + job.delay
    # N - 1 steps: a piece goes on once it is there, and its port has sent those before it.
    step = max(pieces * piece, piece + job.delay)
    return (job.ranks - 2) * step + pieces * piece + job.delay


def best_shard_pieces(algorithm: str, job: AllReduce) -> int:
    """Return the number of pieces per shard that takes least time; the fewest of equals.

    `algorithm`, `job`, BadInput: as of `shard_seconds`.
    """
    cuts = _SHARD_CUTS.get(algorithm, (1,))
    return min(cuts, key=lambda cut: (shard_seconds(algorithm, job, cut), cut))
