"""The schedule that a command times or draws: planned by a policy, or read from a file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_adaptra.cli.job import add_policy, job_of, plan_of
from megatron_adaptra.errors import AdaptraError, BadFile, BadInput
from megatron_adaptra.ir.check import check
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Line, Schedule, parse_line
from megatron_adaptra.plan import Plan, evaluate


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
) -> tuple[Plan, Conditions]:
    """The plan, proven to run within the job's budget, and the job.

    `default`: values of the job, by the keys of a profile, where the user gives none. Raises
    BadInput for a file that is no schedule, ScheduleError for one that cannot run.
    """
    if not args.schedule:
        conditions = job_of(args, default)
        plan = plan_of(args, conditions, args.policy)
        check(plan.program, conditions.activation_budget)
        return plan, conditions
    schedule = read_schedule(args.schedule)
    shape = {key: getattr(schedule, key) for key in ("stages", "microbatches", "chunks")}
    conditions = job_of(args, {**(default or {}), **shape})
    for key, value in shape.items():
        if getattr(conditions, key) != value:
            allowed = f"it has {value} {key}, the job has {getattr(conditions, key)}"
            raise BadInput("--schedule", args.schedule, allowed)
    check(lower(schedule), conditions.activation_budget)  # only what is proven to end is timed
    return evaluate(schedule, conditions, args.sends), conditions


def read_schedule(path: str) -> Schedule:
    """The schedule in the file at `path`, text or JSON; raises BadFile or BadInput."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise BadFile("--schedule", path, f"it cannot be read: {error.strerror}") from None
    except ValueError:
        raise BadFile("--schedule", path, "it is no text") from None
    try:
        if text.lstrip().startswith("{"):
            schedule = _from_json(json.loads(text))
        else:
            schedule = Schedule.parse(text)
        return _checked(schedule)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadFile("--schedule", path, f"it is not JSON: {error}") from None
    except AdaptraError as error:
        raise BadFile("--schedule", path, f"in it, {error}") from None


def _from_json(data: Mapping[str, Any]) -> Schedule:
    """What a plan leaves out, its number of microbatches and chunks, its ops tell."""
    stages = data.get("stages")
    if not isinstance(stages, list) or not all(
        isinstance(line, list) and all(isinstance(op, str) for op in line) for line in stages
    ):
        raise BadInput("stages", stages, "a list per stage of ops such as 'F3'")
    order = tuple(parse_line(line) for line in stages)
    return Schedule(
        order,
        data.get("microbatches", _count(order, "microbatch")),
        data.get("chunks", _count(order, "chunk")),
        str(data.get("policy", "")),
        str(data.get("why", "")),
    )


def _count(order: tuple[Line, ...], what: str) -> int:
    return 1 + max((getattr(op, what) for line in order for op in line), default=0)


def _checked(schedule: Schedule) -> Schedule:
    if not schedule.order:
        raise BadInput("stages", [], "at least 1 stage")
    for key in ("microbatches", "chunks"):
        value = getattr(schedule, key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadInput(key, value, "a whole number of at least 1")
    for op in (op for line in schedule.order for op in line):
        if not op.kind.computes:
            raise BadInput("op", str(op), "a schedule holds F, B, I, W and R; the rest is derived")
    return schedule
