"""The state of a run, for people and checkpoints; `run` is None before training and as stock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_adaptra.adapt.leader import planner_of
from megatron_adaptra.adapter.pipeline.run import Run
from megatron_adaptra.agree.bundle import SCHEDULE
from megatron_adaptra.agree.controller import Controller


def checkpoint_state(run: Run | None) -> dict[str, Any] | None:
    """Return the schedule and delays for a checkpoint, on the rank that leads; None on others."""
    controller = _controller(run)
    remedy = planner_of(controller)
    if controller is None or remedy is None:
        return None
    schedule = controller.ballot.lasting[SCHEDULE]
    return {"schedule": schedule.text(), "delays": remedy.state()}


def summary(run: Run | None) -> str:
    """Describe this moment's plan for a log line, the same on every rank of the plan group."""
    if (controller := _controller(run)) is None:
        return "stock"
    return f"warmup {','.join(map(str, controller.ballot.schedule.warmup))}"


def scalars(run: Run | None) -> dict[str, float]:
    """Return values for charts by name; delays are known on the leader and on the last rank."""
    if (controller := _controller(run)) is None:
        return {}
    status, schedule = controller.status, controller.ballot.schedule
    found = {f"adaptra/warmup/stage-{i}": float(d) for i, d in enumerate(schedule.warmup)}
    for link, seconds in status.get("delays", {}).items():
        found[f"adaptra/delay-ms/{link.replace('>', '-to-')}"] = 1e3 * seconds
    for name in ("predicted", "lower_bound"):
        if name in status:
            found[f"adaptra/{name.replace('_', '-')}-ms"] = 1e3 * status[name]
    if "replans" in status:
        found["adaptra/replans"] = float(status["replans"])
    return found


def replica_scalars(reductions: Sequence[Any], shares: Any) -> dict[str, float]:
    """Return values for charts of what replicas do beside schedules, as this rank knows it.

    `reductions`: the job's PlannedCollectives. `shares`: this rank's Shares; None without.
    """
    found: dict[str, float] = {}
    for reduction in reductions:
        found |= {f"adaptra/{name}": value for name, value in reduction.scalars().items()}
    if shares is not None:
        for replica, count in enumerate(shares.plan.counts):
            found[f"adaptra/microbatches/replica-{replica}"] = float(count)
    return found


def _controller(run: Run | None) -> Controller | None:
    """Return the controller of the plan in force; None where Megatron runs as stock."""
    return None if run is None or run.abandoned else run.controller
