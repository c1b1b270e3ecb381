"""The time of an iteration with each remedy for slow replicas: the ladder's rungs, simulated.

An iteration is the replicas' pipelines and the optimizer step. Nothing is known of the reduction of
gradients, which counts as done at once.
"""

from __future__ import annotations

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.plan.ladder import (
    BY_COUNTS,
    COLLECTIVE,
    ONE_STAGE,
    ONLY_WAITING,
    ORDER,
    ROUTES,
    SHARES,
    Ladder,
    Remedy,
    climb,
)
from megatron_adaptra.plan.pipeline.base import make_plan
from megatron_adaptra.plan.routes.reroute import NONE, evaluate_replicas, plan_replicas
from megatron_adaptra.plan.shares.pipelines import PipelineShares, share_pipelines

OPS = 200_000  # that a search for routes schedules at most, as in a training
MOST = 5_000  # workers x microbatches of a job that routes are searched for: some 8 s
POLICY = "warmup"  # by which each replica plans its own pipeline
UNKNOWN = "what the reduction of gradients takes is not known"  # of COLLECTIVE
TOO_SHORT, TOO_LARGE, NO_PATH = (  # of ROUTES
    "they need at least 2 stages",
    "too large a job to search for them in passing; adaptra compare does",
    "no path between replicas helps",
)


def plan_remedies(
    conditions: ReplicaConditions, sends: str, min_gain: float, ops: int = OPS
) -> Ladder:
    """Plan all remedies, and choose the cheapest that is enough.

    Args:
        conditions: of all workers.
        sends: "eager" or "rendezvous".
        min_gain: see `climb`.
        ops: the most that a search for routes schedules.

    Raises:
        BadInput: a worker is dead, not even stock fits into the memory for activations, or
            `min_gain` is below 0.
    """
    c = conditions
    stock = share_pipelines(c, sends, (c.microbatches,) * c.replicas)
    remedies = (
        Remedy(ORDER, *_order(stock, sends)),
        Remedy(COLLECTIVE, None, UNKNOWN),
        Remedy(ROUTES, *_routes(c, sends, ops)),
        Remedy(SHARES, *_shares(c, sends)),
    )
    full = stock.predicted
    # What makes an iteration longer is not done.
    rungs = [r if r.leaves is None else r._replace(leaves=min(r.leaves, full)) for r in remedies]
    return climb(full, rungs, min_gain)


def _order(stock: PipelineShares, sends: str) -> tuple[float, str]:
    """Return the seconds where each pipeline has a plan of its own if that is faster, and why."""
    alike = {id(plan): plan for plan in stock.plans}.values()
    slowest = max(
        min(plan.predicted, make_plan(plan.conditions, POLICY, sends).predicted) for plan in alike
    )
    if stock.plans[0].conditions.stages == 1:
        return slowest + stock.step, ONE_STAGE
    return slowest + stock.step, ONLY_WAITING


def _routes(c: ReplicaConditions, sends: str, ops: int) -> tuple[float | None, str]:
    if c.stages == 1:
        return None, TOO_SHORT
    if c.workers * c.microbatches > MOST:
        return None, TOO_LARGE
    moves = plan_replicas(c, sends, ops=ops).moves
    pipelines = [evaluate_replicas(one.schedule, c, sends).timeline.pipeline for one in moves]
    name = moves[pipelines.index(min(pipelines))].name
    why = NO_PATH if name == NONE else name
    return min(pipelines) + c.pipeline.step_seconds, why


def _shares(c: ReplicaConditions, sends: str) -> tuple[float | None, str]:
    try:
        return share_pipelines(c, sends).predicted, BY_COUNTS
    except BadInput as error:
        return None, str(error)
