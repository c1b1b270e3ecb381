"""Which plan is worth a swap."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_adaptra.adapt.trial import Outcome, clearly_longer
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan import Plan, evaluate, make_plan
from megatron_adaptra.plan.routes.reroute import ReplicaPlan

AnyPlan = Plan | ReplicaPlan


@dataclass(frozen=True)
class ReplanPolicy:
    """When to swap, and to what.

    `min_gain`: share of an iteration that a new plan has to save. `policy`: of the planner, by name
    (`plan.make_plan`). `fixed`: no plan is made. `sends`: "eager" or "rendezvous". `ahead`: see
    `lower`. `halves`: microbatches for which a stage must have room besides, so that backwards may
    run in halves.
    """

    min_gain: float = 0.15
    policy: str = "warmup"
    fixed: bool = False
    sends: str = "rendezvous"
    ahead: int | None = None
    halves: float = 0.0

    def evaluate(self, schedule: Schedule, conditions: Conditions) -> Plan:
        """What an iteration of the schedule takes.

        Of Megatron's own messages the delay is measured from when both sides were there, so that
        the word between them is in it.
        """
        if schedule.stock:
            return evaluate(schedule, conditions, "eager", 0)
        return evaluate(schedule, conditions, self.sends, self.ahead)

    def make_plan(self, conditions: Conditions) -> Plan:
        """The policy's schedule, and what an iteration of it takes."""
        if not (conditions.split and self.halves):
            return self._plan(conditions)
        plans = [self._plan(replace(conditions, split=False))]
        room = tuple(budget - self.halves for budget in conditions.activation_budget)
        if min(room) >= 1:
            plans.append(self._plan(replace(conditions, activation_budget=room)))
        return min(plans, key=lambda plan: plan.predicted)

    def _plan(self, conditions: Conditions) -> Plan:
        return make_plan(conditions, self.policy, self.sends, ahead=self.ahead)

    def gains(self, plan: AnyPlan, current: AnyPlan) -> bool:
        """Whether a plan is clearly faster."""
        return plan.predicted <= current.predicted * (1 - self.min_gain)

    def worth(self, plan: AnyPlan, current: AnyPlan, eased: bool) -> bool:
        """Whether to swap: clearly faster, or a link is better (`eased`) and memory is freed.

        Back to Megatron's own messages always frees some.
        """
        if plan.schedule.same_as(current.schedule):
            return False
        lighter = sum(plan.peak_in_flight) < sum(current.peak_in_flight) or plan.schedule.stock
        much = current.predicted * (1 + self.min_gain)
        return self.gains(plan, current) or (eased and lighter and plan.predicted <= much)

    def spares(self, start: AnyPlan, current: AnyPlan) -> bool:
        """Whether the plan in force gains so little that the first one would do.

        Half the gain that brings a plan in: what is just worth it does not go to and fro.
        """
        return start.predicted <= current.predicted * (1 + self.min_gain / 2)

    def slower(self, outcome: Outcome, expected: float) -> bool:
        """Whether a change of plan has clearly made iterations slower.

        Args:
            outcome: measured seconds of an iteration.
            expected: what they were to be after it. Back to the first plan that may be more than
                before, since memory is freed; then it has to be clearly more than that, too.
        """
        most = expected + self.min_gain * outcome.before
        return clearly_longer(outcome) and outcome.after > most
