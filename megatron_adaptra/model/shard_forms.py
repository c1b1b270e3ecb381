"""Seconds of a reduce-scatter or an all-gather of equal shards, in closed form: both the same.

All ports are equal, as in model/all_reduce_forms.py. Lateness is in none of the forms: after a rank
has come, it sends (N - 1)/N of the buffer under any plan, and earlier work of others saves none of
that. The forms are exact where no rank is late (tests/unit/sim/test_shard_forms.py).
"""

from __future__ import annotations

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.model.all_reduce_forms import AllReduce

# Numbers of pieces that are tried; more of a ring took longer (docs/evidence/allreduce.md).
_CUTS = {"ring": (1, 2, 4), "direct": (1, 2, 4)}
SHARDED = tuple(_CUTS)


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
    cuts = _CUTS.get(algorithm, (1,))
    return min(cuts, key=lambda cut: (shard_seconds(algorithm, job, cut), cut))
