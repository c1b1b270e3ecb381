"""Words and figures for a schedule of several replicas."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan.routes.words import loads_in_words


def decision(move: str, schedule: Schedule) -> str:
    """Describe the `move` of the `schedule`: the work that workers take over from others."""
    return f"{move}: {loads_in_words(schedule) or 'nothing is moved'}"


def in_table(move: str) -> str:
    """The name of a `move`, for tables and pictures."""
    return "none, best order" if move == "none" else move


def between_replicas(schedule: Schedule) -> int:
    """Messages of an iteration that go from one replica to another: two where a route crosses."""
    routes, crossing = schedule.routes, 0
    for home in range(schedule.replicas):
        for microbatch in range(schedule.microbatches):
            at = [routes.worker(stage, microbatch, home) for stage in range(schedule.stages)]
            replicas = [worker // schedule.stages for worker in at]
            crossing += sum(one != other for one, other in pairwise(replicas))
    return 2 * crossing


def runs_for_others(schedule: Schedule) -> list[int]:
    """Return per worker the microbatches of other replicas that it runs in `schedule`."""
    count = Counter(
        worker
        for worker, line in enumerate(schedule.order)
        for op in line
        if op.kind is Kind.F and op.home != worker // schedule.stages
    )
    return [count[worker] for worker in range(len(schedule.order))]


def one_f_one_b_peaks(conditions: ReplicaConditions) -> list[float]:
    """Return per worker the microbatches that 1F1B holds in flight.

    `conditions`: of all workers.
    """
    stages, count = conditions.stages, conditions.microbatches
    return [float(min(stages - w % stages, count)) for w in range(conditions.workers)]
