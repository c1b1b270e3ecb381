"""Failure plans on disk: one file per job, made once, made anew where it is damaged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_adaptra.base.errors import AdaptraError, BadFile
from megatron_adaptra.base.files import replacing
from megatron_adaptra.ir.check import check
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan.failures import FailurePlan, failure_plans, with_failures

VERSION = 1  # of the file and of the planner: plans of another one are made anew


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
