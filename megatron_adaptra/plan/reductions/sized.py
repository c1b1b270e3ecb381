"""A collective plan by the name of its builder, in as many pieces as the model finds best."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.collective import CollectivePlan
from megatron_adaptra.model.all_reduce_forms import ALGORITHMS, AllReduce, best_pieces
from megatron_adaptra.plan.reductions.chain import sorted_chain
from megatron_adaptra.plan.reductions.direct import direct, shares_without
from megatron_adaptra.plan.reductions.halving_doubling import halving_doubling
from megatron_adaptra.plan.reductions.ring import ring
from megatron_adaptra.plan.reductions.stragglar import stragglar

# Seconds that a message costs on a busy CPU: at this cost the model finds pieces of 1.5 ms best for
# `direct` between 8 hosts of 20 MB/s, as they were on two cores (docs/evidence/allreduce.md).
MESSAGE = 0.1e-3
PORT = 1.25e9  # bytes per second: the port that gradients are cut for, as none is measured
FEWEST_RANKS = {"stragglar": 4}  # of the others: 2
# Of StragglAR, whose rounds are searched, which takes seconds for so many pieces. Large groups
# need no more than one per owner: the doubling at the end takes log2 N rounds of more than N.
_SEARCHED = 256  # pieces


def pieces_for(algorithm: str, job: AllReduce) -> int:
    """Into how many pieces `sized` cuts for the `algorithm` and the `job`; BadInput as there."""
    most = math.inf
    if algorithm == "stragglar":
        most = max(1, _SEARCHED // max(1, job.ranks - 1))
    return best_pieces(algorithm, job, most)


def sized(
    algorithm: str, job: AllReduce, late: Sequence[int] = (), pieces: int = 0
) -> CollectivePlan:
    """The plan of `algorithm` for `job`: equal arguments, equal plans.

    Args:
        algorithm: one of ALGORITHMS of model/all_reduce_forms.py.
        job: what is reduced, over which ports.
        late: ranks that come late: they own nothing in `direct`, add last in a chain; StragglAR
            needs exactly one.
        pieces: instead of the best: what the builder takes, such as StragglAR's k.

    Raises:
        BadInput: an algorithm, ranks or pieces that there are not.
    """
    if algorithm not in ALGORITHMS:
        raise BadInput("algorithm", algorithm, f"it has to be one of {', '.join(ALGORITHMS)}")
    ranks = job.ranks
    shares = shares_without(ranks, late)  # which refuses ranks that there are not
    if algorithm == "halving-doubling":
        return halving_doubling(ranks)
    count = pieces or pieces_for(algorithm, job)
    if algorithm == "ring":
        return ring(ranks, count)
    if algorithm == "sorted-chain":
        return sorted_chain(sorted(range(ranks), key=lambda rank: (rank in late, rank)), count)
    if algorithm == "direct":
        return direct(shares, count)
    if len(set(late)) != 1:
        raise BadInput("late ranks", list(late), "stragglar needs the one rank that is late")
    return stragglar(ranks, late[0], count)


def for_gradients(
    algorithm: str, ranks: int, nbytes: int, late: Sequence[int] = (), pieces: int = 0
) -> CollectivePlan:
    """The plan of `algorithm` for a bucket of gradients, where nothing is known of the network.

    Args:
        algorithm, late, pieces: as of `sized`; a late rank is taken for very late.
        ranks: how many.
        nbytes: of the bucket.

    Raises:
        BadInput: as `sized`.
    """
    job = AllReduce(ranks, nbytes, PORT, cost=MESSAGE, late=math.inf if late else 0.0)
    return sized(algorithm, job, late, pieces)
