"""The schedule that a command times or draws: planned by a policy, or read from a file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from megatron_adaptra.cli.job import Job, job_of
from megatron_adaptra.cli.once import given
from megatron_adaptra.cli.planning import add_policy, proven_plan
from megatron_adaptra.errors import AdaptraError, BadFile, BadInput, ScheduleError
from megatron_adaptra.ir.check import check
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan import Plan, evaluate
from megatron_adaptra.user_files import parse_json, read_text


def add_source(parser: argparse.ArgumentParser) -> None:
    """The flags that name a planner or a file with a schedule."""
    add_policy(parser)
    parser.add_argument(
        "--schedule",
        metavar="FILE",
        help="take this schedule instead of planning one: the text form of a schedule, or JSON as "
        "`adaptra plan --json` prints it; the job's shape is then known from the file",
    )


def planned_or_read(
    args: argparse.Namespace, default: Mapping[str, Any] | None = None
) -> tuple[Plan, Job]:
    """The plan, proven to run within the job's budget, and the job.

    `default`: values of the job, by the keys of a profile, where the user gives none. Raises
    BadFile for a file that is no schedule or one that cannot run, and BadInput for another job.
    """
    if args.schedule is None:
        job = job_of(args, default)
        return proven_plan(args, job), job
    if "policy" in given(args):
        raise BadInput("--policy", args.policy, "nothing is planned, as --schedule is given")
    schedule = read_schedule(args.schedule)
    shape = {key: getattr(schedule, key) for key in ("stages", "microbatches", "chunks")}
    job = job_of(args, {**(default or {}), **shape})
    conditions = job.conditions
    for key, value in shape.items():
        if getattr(conditions, key) != value:
            allowed = f"it has {value} {key}, the job has {getattr(conditions, key)}"
            raise BadInput("--schedule", args.schedule, allowed)
    try:
        check(lower(schedule), conditions.activation_budget)  # only what is proven to end is timed
    except ScheduleError as error:
        raise BadFile("--schedule", args.schedule, f"it cannot run: {error}") from None
    return evaluate(schedule, conditions, args.sends), job


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
