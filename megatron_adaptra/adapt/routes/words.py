"""Sentences for people on why a plan for several replicas comes or goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron_adaptra.base.units import brief
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.routes import Path
from megatron_adaptra.measure.slow_workers import worker_in_words
from megatron_adaptra.plan.link_words import MOST_NAMED, link_in_words
from megatron_adaptra.plan.routes.reroute import ReplicaPlan

BACK = "back to 1F1B, every microbatch at home"


def why_change(
    paths: Mapping[Path, float],
    workers: Iterable[int],
    conditions: ReplicaConditions,
    current: ReplicaPlan,
    plan: ReplicaPlan,
    back: bool,
) -> str:
    """Describe what has changed, and what is done about it.

    Args:
        paths: with the seconds that a message took there before.
        workers: that are slow, or not any more.
        conditions: what they are now.
        current: what is in force.
        plan: what comes.
        back: whether that is the start.
    """
    what = _changes(paths, workers, conditions)
    return f"{what}: {BACK if back else what_runs(current, plan)}"


def why_stays(
    paths: Mapping[Path, float], workers: Iterable[int], conditions: ReplicaConditions
) -> str:
    """Describe changes that lead to no plan; `paths` and `workers` as for `why_change`."""
    what = _changes(paths, workers, conditions)
    return f"{what}: no plan is enough faster, so that the one in force stays"


def _changes(
    paths: Mapping[Path, float], workers: Iterable[int], conditions: ReplicaConditions
) -> str:
    c = conditions
    found = [worker_in_words(worker, c.slow.get(worker, 1.0), c.stages) for worker in workers]
    found += [
        f"path {c.name(a)}>{c.name(b)} takes {link_in_words(c, (a, b))}, "
        + (f"before {1e3 * old:.3g} ms" if old else "from the start")
        for (a, b), old in paths.items()
    ]
    if len(found) > MOST_NAMED:
        found = [*found[:MOST_NAMED], f"and {len(found) - MOST_NAMED} more"]
    return ", ".join(found) or "measured again"


def what_runs(current: ReplicaPlan, plan: ReplicaPlan) -> str:
    """Describe the routes of `plan`; without any, the warmups in it and in the `current` one."""
    if plan.schedule.routes.moved:
        return plan.schedule.why
    old, new = (brief(one.schedule.warmup) for one in (current, plan))
    return f"every microbatch at home (warmup {old} -> {new})"


def why_spared(current: ReplicaPlan, start: ReplicaPlan) -> str:
    """Describe why the `start` comes back: the `current` plan gains too little now."""
    return (
        f"{what_runs(start, current)}: that gains too little now, an iteration takes "
        f"{1e3 * current.predicted:.4g} ms, and {1e3 * start.predicted:.4g} without it: {BACK}"
    )


def why_tried(worker: str, idle: int) -> str:
    """Describe why `worker`, as `1.2`, gets a microbatch: it ran none for `idle` iterations."""
    return (
        f"worker {worker} has run nothing for {idle} iterations: it gets one microbatch, which "
        "shows what it takes now"
    )


def why_tried_enough(workers: Iterable[int], conditions: ReplicaConditions) -> str:
    """Describe why a try ends: the `workers` that got a microbatch are as slow as before."""
    c = conditions
    found = [worker_in_words(worker, c.slow.get(worker, 1.0), c.stages) for worker in workers]
    return f"{', '.join(found)}: the plan before comes back"
