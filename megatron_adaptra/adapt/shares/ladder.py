"""Remedies for a slow replica that are cheaper than shares, and the seconds that they would leave.

Under `share` a figure is the least that any such plan takes, so that a reader can judge the
decision. Under `auto` the cheapest remedy that is enough is taken (plan/ladder.py). The seconds
that a cheaper one leaves are those that its planner offers; before that, its lower bound; and, once
it has had PATIENCE iterations to act, the measured ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_adaptra.adapt.offer import Offered
from megatron_adaptra.plan.ladder import BY_COUNTS, COLLECTIVE, ORDER, ROUTES, SHARES, Remedy
from megatron_adaptra.plan.shares.counts import SharePlan, Speed

PATIENCE = 24  # iterations that cheaper remedies have to act, before what they leave is measured


class Known(NamedTuple):
    """A known remedy leaves `remedy.leaves` seconds where `certain`, else that or more."""

    remedy: Remedy
    certain: bool


def cheaper_remedies(
    speeds: Sequence[Speed], microbatches: int, step: float, stages: int
) -> tuple[Remedy, ...]:
    """Return the remedies that are cheaper than shares of microbatches, the cheapest first.

    Args:
        speeds: by replica.
        microbatches: of a replica in stock.
        step: seconds of an iteration after the last replica has run its microbatches.
        stages: of each replica's pipeline.
    """
    computes = max(microbatches * speed.per_microbatch for speed in speeds)
    arrives = max(speed.seconds(microbatches) for speed in speeds)
    if stages > 1:
        slack = computes + step, "a schedule hides waiting, not compute"
        routes = None, "it is not used together with shares of microbatches"
    else:
        slack = arrives + step, "one stage never waits for another"
        routes = None, "it needs at least 2 stages"
    return (
        Remedy(ORDER, *slack),
        Remedy(COLLECTIVE, arrives, "they hide communication, not compute"),
        Remedy(ROUTES, *routes),
    )


def known_remedies(
    share: SharePlan, with_shares: float, offered: Offered, measured: bool
) -> list[Known]:
    """Return all rungs of the ladder under `auto`, the cheapest first.

    Args:
        share: the best counts, where a replica is slow; its `full` is what iterations take as they
            are, whatever is in force.
        with_shares: seconds of an iteration with these counts.
        offered: by the planners of the remedies that are allowed.
        measured: these have had the time to act.
    """
    full, replicas = share.full, share.sync.replicas
    # A late rank's part has to cross its port once; a ring sends it 2 (N - 1) / N times.
    hidden = share.step * (replicas - 2) / (2 * (replicas - 1)) if replicas > 1 else 0.0
    least = {COLLECTIVE: full - hidden, ROUTES: min(share.bound, full)}
    found = [Known(Remedy(ORDER, full, "each pipeline has a plan of its own already"), True)]
    for name, bound in least.items():
        if name not in offered.names:
            found.append(Known(Remedy(name, None, "not allowed, or not possible here"), True))
        elif measured:
            found.append(Known(Remedy(name, full, "measured, with what of it is in force"), True))
        elif (leaves := offered.leaves(name)) is not None:
            found.append(Known(Remedy(name, leaves * full, "as its planner expects"), True))
        else:
            found.append(Known(Remedy(name, bound, "no less; not planned yet"), False))
    found.append(Known(Remedy(SHARES, with_shares, BY_COUNTS), True))
    return found
