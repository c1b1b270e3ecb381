"""The schedule that a command times or draws: planned by a policy, or read from a file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_adaptra.base.errors import AdaptraError, BadFile, BadInput, ScheduleError
from megatron_adaptra.base.user_files import parse_json, read_text
from megatron_adaptra.cli.job import Job, job_of
from megatron_adaptra.cli.once import given
from megatron_adaptra.cli.planning import proven_plan
from megatron_adaptra.ir.check import check
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan import Plan, evaluate


def add_source(parser: argparse.ArgumentParser) -> None:
    """The flag that names a file with a schedule."""
    parser.add_argument(
        "--schedule",
        metavar="FILE",
        help="take this schedule instead of planning one: the text form of a schedule, or JSON as "
        "`adaptra plan --json` prints it; the job's shape is then known from the file",
    )


def sourced(
    args: argparse.Namespace, default: Mapping[str, Any] | None = None
) -> tuple[Job, Schedule | None]:
    """The job, and the schedule of --schedule, which has its shape; None where one is planned.

    `default`: values of the job, by the keys of a profile, where the user gives none. Raises
    BadFile for a file that is no schedule, and BadInput for another job.
    """
    if args.schedule is None:
        return job_of(args, default), None
    if "policy" in given(args):
        raise BadInput("--policy", args.policy, "nothing is planned, as --schedule is given")
    schedule = read_schedule(args.schedule)
    keys = ("stages", "microbatches", "chunks", *["replicas"] * (schedule.replicas > 1))
    shape = {key: getattr(schedule, key) for key in keys}
    job = job_of(args, {**(default or {}), **shape})
    found = {key: getattr(job.conditions, key) for key in keys[:3]}
    found["replicas"] = job.replicas.replicas if job.replicas else 1
    for key, value in {**shape, "replicas": schedule.replicas}.items():
        if found[key] != value:
            allowed = f"it has {value} {key}, the job has {found[key]}"
            raise BadInput("--schedule", args.schedule, allowed)
    return job, schedule


def plan_from(args: argparse.Namespace, job: Job, schedule: Schedule | None) -> Plan:
    """The plan for a `job` of one pipeline, proven to run within its budget.

    `schedule`: that was read; None to plan one. Raises BadFile for one that cannot run.
    """
    if schedule is None:
        return proven_plan(args, job)
    refuse_stuck(args, schedule, job.conditions.activation_budget)
    return evaluate(schedule, job.conditions, args.sends)


def refuse_stuck(args: argparse.Namespace, schedule: Schedule, budget: Sequence[float]) -> None:
    """Raise BadFile for a `schedule` that cannot run within `budget`: only what ends is timed."""
    try:
        check(lower(schedule), budget)
    except ScheduleError as error:
        raise BadFile("--schedule", args.schedule, f"it cannot run: {error}") from None


def read_schedule(path: str) -> Schedule:
    """The schedule in the file at `path`, text or JSON; raises BadFile."""
    text = read_text(path, "--schedule")
    try:
        if text.lstrip().startswith("{"):
            return Schedule.from_json(parse_json(text))
        return Schedule.parse(text)
    except ValueError as error:
        raise BadFile("--schedule", path, f"it is not JSON: {error}") from None
    except AdaptraError as error:
        raise BadFile("--schedule", path, f"in it, {error}") from None
