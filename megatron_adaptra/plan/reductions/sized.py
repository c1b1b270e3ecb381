"""A collective plan by the name of its builder, in as many pieces as the model finds best.

Or the one in a file that the setting `--adaptra-allreduce` names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from megatron_adaptra.base.errors import BadFile, BadInput
from megatron_adaptra.base.user_files import read_text
from megatron_adaptra.config import ALLREDUCES
from megatron_adaptra.ir.collective import CollectivePlan, Goal
from megatron_adaptra.model.all_reduce_forms import (
    ALGORITHMS,
    SHARDED,
    AllReduce,
    best_pieces,
    best_shard_pieces,
)
from megatron_adaptra.plan.reductions.builders import SHARD_BUILDERS, sharded_plan, shares_without
from megatron_adaptra.plan.reductions.choice import built
from megatron_adaptra.sim.ports import Ports

# Seconds that a message costs on a busy CPU: at this cost the model finds pieces of 1.5 ms best for
# `direct` between 8 hosts of 20 MB/s, as they were on two cores (docs/evidence/allreduce.md).
MESSAGE = 0.1e-3
PORT = 1.25e9  # bytes per second: the port that gradients are cut for, as none is measured
FEWEST_RANKS = {"stragglar": 4}  # of the others: 2
# Of StragglAR, whose rounds are searched, which takes seconds for so many pieces. Large groups
# need no more than one per owner: the doubling at the end takes log2 N rounds of more than N.
_SEARCHED = 256  # pieces
_SETTING = "--adaptra-allreduce"


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
    if algorithm == "stragglar" and len(set(late)) != 1:
        raise BadInput("late ranks", list(late), "stragglar needs the one rank that is late")
    return built(algorithm, ranks, pieces or pieces_for(algorithm, job), shares, sorted(set(late)))


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


def for_shards(goal: Goal, algorithm: str, ranks: int, nbytes: int) -> CollectivePlan:
    """The plan of `algorithm` for a bucket of `nbytes`, where nothing is known of the network.

    `goal`: a reduce-scatter or an all-gather. `algorithm`: one of SHARDED of
    model/all_reduce_forms.py. `ranks`: how many.

    Raises:
        BadInput: a goal or an algorithm without such a plan.
    """
    if (goal, algorithm) not in SHARD_BUILDERS:
        allowed = f"{' and '.join(SHARDED)} have a reduce-scatter and an all-gather"
        raise BadInput(goal.value, algorithm, allowed)
    job = AllReduce(ranks, nbytes, PORT, cost=MESSAGE)
    return sharded_plan(goal, algorithm, ranks, best_shard_pieces(algorithm, job))


def shard_pieces(nbytes: int, ports: Ports) -> dict[str, int]:
    """By algorithm of SHARDED, into how many pieces each shard of a buffer is best cut.

    `nbytes`: of the buffer. `ports`: of all ranks.
    """
    slowest = min(*ports.out, *ports.into)  # as if all were alike, as the closed forms know them
    job = AllReduce(len(ports.out), nbytes, slowest, ports.delay, ports.cost)
    return {name: best_shard_pieces(name, job) for name in SHARDED}


def plan_in_file(allreduce: str, ranks: int | None = None) -> CollectivePlan | None:
    """The plan that the setting `allreduce` names the file of, proven; None for a builder's name.

    `ranks`: for how many it has to be; None for any number. Raises BadFile.
    """
    if allreduce in ALLREDUCES:
        return None
    if not Path(allreduce).exists():
        names = ", ".join(ALLREDUCES)
        allowed = f"it has to be one of {names}, or a file with a collective plan"
        raise BadFile(_SETTING, allreduce, allowed)
    try:
        return CollectivePlan.parse(read_text(allreduce, _SETTING), ranks)
    except BadFile:
        raise
    except BadInput as error:
        raise BadFile(_SETTING, allreduce, f"in it, {error}") from None
