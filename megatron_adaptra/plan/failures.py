"""Plans for failures: for each number of dead workers, the stages where they cost the least.

Failure normalisation (ReCycle, SOSP 2024): a healthy worker can take the place of a dead one at
another stage, once it has copied a peer's parameters. So of all ways in which so many workers may
be missing, only the best needs a plan, and there are as many plans as failures, not as there are
sets of workers. On disk there is one file per job, made once, and anew where it is damaged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_adaptra.base.errors import AdaptraError, BadFile, BadInput
from megatron_adaptra.base.files import replacing
from megatron_adaptra.base.units import ten_digits
from megatron_adaptra.ir.check import check
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.model.replica_bounds import replica_bound
from megatron_adaptra.plan.routes.reroute import plan_replicas

SHORT = 60_000  # ops of the search that ranks the places
LONG = 2  # of the best places are searched in full
VERSION = 1  # of the file and of the planner: plans of another one are made anew
Vector = tuple[int, ...]  # per stage, how many of its workers are dead


class FailurePlan(NamedTuple):
    """A failure plan holds the schedule to run while so many workers are missing.

    Args:
        vector: per stage, how many workers are dead in the best case.
        seconds: of an iteration, predicted.
        schedule: of all replicas; the dead workers' lines are empty.
    """

    vector: Vector
    seconds: float
    schedule: Schedule


def failure_vectors(stages: int, failures: int, most: int) -> Iterator[Vector]:
    """Yield all ways in which `failures` workers can be missing at `stages`, `most` at each."""
    if stages == 1:
        if failures <= most:
            yield (failures,)
        return
    for first in range(min(failures, most), -1, -1):
        for rest in failure_vectors(stages - 1, failures - first, most):
            yield first, *rest


def with_failures(conditions: ReplicaConditions, vector: Vector) -> ReplicaConditions:
    """Return the job with `vector[s]` more workers of stage s dead: the slowest, else the last."""
    c, failed = conditions, set(conditions.failed)
    for stage, count in enumerate(vector):
        alive = sorted(c.alive(stage), key=lambda w: (-c.slow.get(w, 1.0), -w))
        failed.update(alive[:count])
    return replace(c, failed=frozenset(failed))


def best_failures(
    conditions: ReplicaConditions, failures: int, sends: str = "eager"
) -> FailurePlan:
    """Find the stages where so many `failures` cost the least, and plan for them.

    Vectors are tried in the order of their lower bounds, until no bound is below the best plan: by
    a short search, and the best few by a long one.

    Args:
        conditions: of the job, without them.
        failures: at least 1.
        sends: "eager" or "rendezvous".

    Raises:
        BadInput: so many leave a stage without any worker.
    """
    c = conditions
    spare = [len(c.alive(stage)) - 1 for stage in range(c.stages)]
    if not 1 <= failures <= sum(spare):
        raise BadInput("failures", failures, f"1 to {sum(spare)}: every stage keeps a worker")
    vectors = [
        vector
        for vector in failure_vectors(c.stages, failures, max(spare))
        if all(dead <= most for dead, most in zip(vector, spare, strict=True))
    ]
    candidates = [(vector, with_failures(c, vector)) for vector in vectors]
    jobs = [(replica_bound(job), vector, job) for vector, job in candidates]
    jobs.sort(key=lambda one: (ten_digits(one[0]), one[1]))
    found: list[tuple[float, Vector, ReplicaConditions, FailurePlan]] = []
    for bound, vector, job in jobs:
        if found and bound >= min(one[0] for one in found) * (1 - 1e-9):
            break
        plan = plan_replicas(job, sends, ops=SHORT)
        kept = FailurePlan(vector, plan.predicted, plan.schedule)
        found.append((ten_digits(plan.predicted), vector, job, kept))
    found.sort(key=lambda one: one[:2])
    best = found[0][3]
    for _, vector, job, _ in found[:LONG]:
        if best.seconds > replica_bound(job) * (1 + 1e-9):
            plan = plan_replicas(job, sends)
            if plan.predicted < best.seconds * (1 - 1e-9):
                best = FailurePlan(vector, plan.predicted, plan.schedule)
    return best


def failure_plans(
    conditions: ReplicaConditions,
    most: int,
    sends: str = "eager",
    report: Callable[[str], None] = lambda text: None,
) -> tuple[FailurePlan, ...]:
    """Return the best plan for each number of failures: 1, 2, ... `most`.

    Args:
        conditions: of the job, without them.
        most: failures to be ready for.
        sends: "eager" or "rendezvous".
        report: called with a line on each number that is planned next.

    Raises:
        BadInput: so many leave a stage without any worker.
    """
    plans = []
    for failures in range(1, most + 1):
        report(f"planning for {failures} of {most} failures")
        plans.append(best_failures(conditions, failures, sends))
    return tuple(plans)


def stored_failure_plans(
    folder: Path,
    conditions: ReplicaConditions,
    most: int,
    sends: str = "eager",
    report: Callable[[str], None] = lambda text: None,
) -> tuple[FailurePlan, ...]:
    """The plans for 1 to `most` failures: read from `folder`, or made and kept there.

    A file that is damaged, cut short, of another version or for other conditions is replaced.

    Args:
        folder: is made where there is none.
        conditions: of the job, without failures.
        most: failures to be ready for.
        sends: "eager" or "rendezvous".
        report: called with a line on what is done.

    Raises:
        BadInput: so many failures leave a stage without any worker.
        BadFile: the folder or the file cannot be written.
    """
    key = job_key(conditions, most, sends)
    path = folder / f"failures-{key[:16]}.json"
    try:
        return _read(path, key, conditions)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AdaptraError) as fault:
        report(f"{path} is not usable, and is made anew: {fault}")
    plans = failure_plans(conditions, most, sends, report)
    body = {"version": VERSION, "key": key, "plans": [_to_json(plan) for plan in plans]}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write_text(json.dumps({**body, "digest": _digest(body)}) + "\n")
    except OSError as fault:
        raise BadFile("failure plans", path, f"it cannot be written: {fault}") from None
    return plans


def job_key(conditions: ReplicaConditions, most: int, sends: str) -> str:
    """SHA-256 of all that the plans depend on: `conditions`, `most` failures, kind of `sends`."""
    return _digest([VERSION, conditions.to_json(), most, sends])


def _read(path: Path, key: str, conditions: ReplicaConditions) -> tuple[FailurePlan, ...]:
    data = json.loads(path.read_text())
    body = {name: data[name] for name in ("version", "key", "plans")}
    if data["digest"] != _digest(body):
        raise ValueError("its digest does not fit what it holds")
    if (body["version"], body["key"]) != (VERSION, key):
        raise ValueError("it is of another version, or for another job")
    plans = tuple(_from_json(one) for one in body["plans"])
    for plan in plans:
        job = with_failures(conditions, plan.vector)
        dead = job.failed
        budget = [0.0 if w in dead else b for w, b in enumerate(job.activation_budget)]
        check(lower(plan.schedule), budget)
    return plans


def _to_json(plan: FailurePlan) -> dict[str, Any]:
    schedule = plan.schedule.to_json()
    return {"vector": list(plan.vector), "seconds": plan.seconds, "schedule": schedule}


def _from_json(data: Any) -> FailurePlan:
    schedule = Schedule.from_json(data["schedule"])
    return FailurePlan(tuple(data["vector"]), float(data["seconds"]), schedule)


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
