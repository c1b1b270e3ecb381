"""Where one to three failures hurt least and most: `python benchmarks/failure_places.py`.

Beside the common optimizer step, which is planned for, the period of ReCycle's *staggered* one
(SOSP 2024): a stage steps as soon as it is done. Nothing runs so, as clipping by the global norm
needs all stages before any may step.
"""

from __future__ import annotations

from typing import Any

from common import main

from megatron_adaptra.base.errors import ScheduleError
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.deps import Token, maker, makes, needs, recomputed_of
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.model.replica_bounds import replica_bound
from megatron_adaptra.plan.failures import SHORT, best_failures, failure_vectors, with_failures
from megatron_adaptra.plan.routes.reroute import plan_replicas
from megatron_adaptra.sim.clock import Costs

ITERATIONS = 12
SHAPES = (3, 4, 6), (4, 4, 8), (4, 4, 16)  # replicas, stages, microbatches
BEYOND = 0, 2, 8  # microbatches in flight beyond 1F1B's


def staggered_period(schedule: Schedule, costs: Costs) -> float:
    """Seconds from one iteration to the next where the same schedule runs again and again.

    A worker starts the next iteration once all workers of its stage are done with this one. Sends
    are eager; a message takes its link's delay and its own time on the wire, without a queue.

    Raises:
        ScheduleError: the schedule cannot finish.
    """
    routes, free = schedule.routes, [0.0] * len(schedule.order)
    ends: list[float] = []
    for _ in range(ITERATIONS):
        free = _iteration(schedule, costs, free)
        for stage in range(routes.stages):
            free[stage :: routes.stages] = [max(free[stage :: routes.stages])] * routes.replicas
        ends.append(max(free))
    half = ITERATIONS // 2
    return (ends[-1] - ends[half - 1]) / (ITERATIONS - half)


def _iteration(schedule: Schedule, costs: Costs, start: list[float]) -> list[float]:
    """When each worker is done that may begin at `start`."""
    routes, now, at = schedule.routes, list(start), [0] * len(start)
    made: dict[Token, float] = {}
    recomputed = [recomputed_of(line) for line in schedule.order]
    moving = True
    while moving:
        moving = False
        for worker, line in enumerate(schedule.order):
            while at[worker] < len(line):
                op = line[at[worker]]
                wanted = needs(op, worker, routes, op[1:] in recomputed[worker])
                if any(token not in made for token in wanted):
                    break
                for token in wanted:
                    there, source = made[token], maker(token, routes)
                    if source != worker:
                        port = max(costs.port(source), costs.port(worker))
                        there += costs.link(source, worker).delay
                        there += max(costs.wire(source, worker), port)
                    now[worker] = max(now[worker], there)
                now[worker] += costs.seconds(op.kind, worker) / routes.chunks
                token_made = makes(op, worker, routes)
                if token_made is not None:
                    made[token_made] = now[worker]
                at[worker] += 1
                moving = True
    if any(i < len(line) for i, line in zip(at, schedule.order, strict=True)):
        raise ScheduleError("the schedule cannot finish; `check` says why")
    return now


def equal_job(replicas: int, stages: int, count: int, beyond: int) -> ReplicaConditions:
    """All ops of one unit of time, and room for so many more than 1F1B has in flight."""
    one = (1.0,) * stages
    room = tuple(float(stages - s + beyond) for s in range(stages))
    return ReplicaConditions(Conditions(count, one, one, one, activation_budget=room), replicas)


def rows(_: int) -> list[dict[str, Any]]:
    out = []
    for replicas, stages, count in SHAPES:
        for failures in (1, 2, 3):
            for beyond in BEYOND:
                job = equal_job(replicas, stages, count, beyond)
                best = best_failures(job, failures)
                vectors = failure_vectors(stages, failures, replicas - 1)
                worst = max(vectors, key=lambda v, job=job: replica_bound(with_failures(job, v)))
                plan = plan_replicas(with_failures(job, worst), ops=SHORT)
                out.append(
                    {
                        "D x P x M": f"{replicas} x {stages} x {count}",
                        "failures": failures,
                        "beyond": f"+{beyond}",
                        "best": f"{best.seconds:g} at {best.vector}",
                        "staggered": staggered_period(
                            best.schedule, with_failures(job, best.vector)
                        ),
                        "worst": f"{plan.predicted:g} at {worst}",
                        "worst staggered": staggered_period(
                            plan.schedule, with_failures(job, worst)
                        ),
                    }
                )
    return out


if __name__ == "__main__":
    main("Failures", rows)
