"""Searches for routes, one line of JSON after another: a process of its own beside a training.

`python megatron_adaptra/package.py megatron_adaptra.plan.route_server` reads requests from its
standard input, `{"conditions": .., "sends": "eager", "ops": 200000}`, and answers each with
`{"schedules": [text, ..]}` or `{"error": text}`. It ends with its input, and with its parent.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan.reroute import plan_replicas
from megatron_adaptra.processes import die_with_parent

NICE = 10  # the training comes first where cores are short


def search(conditions: ReplicaConditions, sends: str, ops: int) -> list[Schedule]:
    """The best schedule of each move, the cheapest move first.

    Args:
        conditions, sends, ops: see `plan_replicas`.
    """
    return [move.schedule for move in plan_replicas(conditions, sends, ops=ops).moves]


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    conditions = ReplicaConditions.from_json(request["conditions"])
    try:
        found = search(conditions, request["sends"], request["ops"])
    except Exception as error:  # the process that has asked logs it
        return {"error": f"{type(error).__name__}: {error}"}
    return {"schedules": [schedule.text() for schedule in found]}


def main() -> None:
    """Answer until the input ends."""
    die_with_parent()
    os.nice(NICE)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
