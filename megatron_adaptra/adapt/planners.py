"""Planners in processes of their own: for routes between replicas, and for all-reduces."""

from __future__ import annotations

from typing import Any

from megatron_adaptra.adapt.planning_process import PlanningProcess
from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan.reductions.choice import Choice
from megatron_adaptra.plan.reductions.figures import Figures
from megatron_adaptra.plan.reductions.selector import Chosen
from megatron_adaptra.plan.server import choose


class RouteProcess(PlanningProcess):
    """A route process searches for routes between replicas; see PlanningProcess."""

    def __init__(self) -> None:
        super().__init__("megatron_adaptra.plan.server")

    def __call__(self, conditions: ReplicaConditions, sends: str, ops: int) -> list[Schedule]:
        """Search as `plan.server.search` does. Raises PlanningFailed."""
        request = {"conditions": conditions.to_json(), "sends": sends, "ops": ops}
        return self.ask(request, _schedules)


class ChoiceProcess(PlanningProcess):
    """A choice process chooses all-reduces; see PlanningProcess."""

    def __init__(self) -> None:
        super().__init__("megatron_adaptra.plan.server")

    def __call__(self, figures: Figures, in_force: Choice, min_gain: float) -> Chosen:
        """Choose as `plan.server.choose` does, and raise BadInput where it does.

        The process starts with the first choice that needs a search. Raises PlanningFailed, too.
        """
        if not (in_force.sharded or figures.rounded().stands_out):
            return choose(figures, in_force, min_gain)  # native, at once

        def read(answer: dict[str, Any]) -> Chosen:
            found = Chosen.from_json({key: answer[key] for key in answer if key != "number"})
            if (found.choice.ranks, found.choice.sharded) != (in_force.ranks, in_force.sharded):
                raise BadInput("choice", str(found.choice), f"in place of {in_force}")
            return found

        request = {
            "figures": figures.to_json(), "in_force": in_force.to_json(), "min_gain": min_gain,
        }  # fmt: skip
        return self.ask(request, read)


def _schedules(answer: dict[str, Any]) -> list[Schedule]:
    return [Schedule.parse(text) for text in answer["schedules"]]
