"""Searches in a process of its own beside a training: one line of JSON after another.

`python base/package.py megatron_adaptra.plan.server` answers adapt/planning_process.py, namely

- `{"conditions": .., "sends": "eager", "ops": 200000}` by `{"schedules": [text, ..]}`;
- `{"figures": .., "in_force": .., "min_gain": 0.05}` as Chosen.to_json has it.

A request has a `number`, which its answer has, too.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from megatron_adaptra.base.processes import die_with_parent
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan.reductions.choice import Choice
from megatron_adaptra.plan.reductions.figures import Figures
from megatron_adaptra.plan.reductions.selector import Chosen, choose_all_reduce
from megatron_adaptra.plan.reductions.shard_selector import choose_shards
from megatron_adaptra.plan.routes.reroute import plan_replicas

NICE = 10  # the training comes first where cores are short


def search(conditions: ReplicaConditions, sends: str, ops: int) -> list[Schedule]:
    """Find the best schedule of each move, the cheapest move first.

    Args:
        conditions, sends, ops: see `plan_replicas`.
    """
    return [move.schedule for move in plan_replicas(conditions, sends, ops=ops).moves]


def choose(figures: Figures, in_force: Choice, min_gain: float) -> Chosen:
    """Choose the reduction to run from now on, of whole buffers or of shards, as `in_force` is.

    Args:
        figures, in_force, min_gain: see `choose_all_reduce` and `choose_shards`.

    Raises:
        BadInput: as these.
    """
    return (choose_shards if in_force.sharded else choose_all_reduce)(figures, in_force, min_gain)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a `request`, as an object for json.dump."""
    if "figures" in request:
        figures = Figures.from_json(request["figures"])
        return choose(figures, Choice.from_json(request["in_force"]), request["min_gain"]).to_json()
    conditions = ReplicaConditions.from_json(request["conditions"])
    found = search(conditions, request["sends"], request["ops"])
    return {"schedules": [schedule.text() for schedule in found]}


def serve() -> None:
    """Answer all requests, until the input ends; the process ends with its parent, too.

    An exception is answered with `{"error": text}`.
    """
    die_with_parent()
    if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):  # of which nice changes nothing
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    os.nice(NICE)
    for line in sys.stdin:
        request = json.loads(line)
        number = request.pop("number")
        try:
            found = answer(request)
        except Exception as error:  # the process that has asked logs it
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found | {"number": number}), flush=True)


if __name__ == "__main__":
    serve()
