"""Searches for routes in a process of its own beside a training.

`python base/package.py megatron_adaptra.plan.routes.route_server` takes requests such as
`{"conditions": .., "sends": "eager", "ops": 200000}`, and answers `{"schedules": [text, ..]}`.
"""

from __future__ import annotations

from typing import Any

from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan.planning_server import serve
from megatron_adaptra.plan.routes.reroute import plan_replicas


def search(conditions: ReplicaConditions, sends: str, ops: int) -> list[Schedule]:
    """Find the best schedule of each move, the cheapest move first.

    Args:
        conditions, sends, ops: see `plan_replicas`.
    """
    return [move.schedule for move in plan_replicas(conditions, sends, ops=ops).moves]


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the schedules, as text, that `search` finds for a `request`."""
    conditions = ReplicaConditions.from_json(request["conditions"])
    found = search(conditions, request["sends"], request["ops"])
    return {"schedules": [schedule.text() for schedule in found]}


if __name__ == "__main__":
    serve(answer)
