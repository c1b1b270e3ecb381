"""The policy that decides which plan is worth a swap."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_adaptra.adapt.trial import Outcome, clearly_longer
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan import Plan, evaluate, make_plan
from megatron_adaptra.plan.routes.reroute import ReplicaPlan

AnyPlan = Plan | ReplicaPlan


@dataclass(frozen=True)
class ReplanPolicy:
    """A replan policy decides when to swap, and to what.

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
        """Compute what an iteration of the schedule takes.

        The delay of Megatron's own messages counts from when both sides are there, so that it
        contains the handshake between them.
        """
        if schedule.stock:
            return evaluate(schedule, conditions, "eager", 0)
        return evaluate(schedule, conditions, self.sends, self.ahead)

    def make_plan(self, conditions: Conditions) -> Plan:
        """Make the policy's schedule, and compute what an iteration of it takes."""
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
        """Return whether a plan is clearly faster, by the share `min_gain` at least."""
        return plan.predicted <= current.predicted * (1 - self.min_gain)

    def worth(self, plan: AnyPlan, current: AnyPlan, eased: bool) -> bool:
        """Return whether to swap: to be clearly faster, or to free memory once a link has `eased`.

        A return to Megatron's own messages always frees some.
        """
        if plan.schedule.same_as(current.schedule):
            return False
        lighter = sum(plan.peak_in_flight) < sum(current.peak_in_flight) or plan.schedule.stock
        much = current.predicted * (1 + self.min_gain)
        return self.gains(plan, current) or (eased and lighter and plan.predicted <= much)

    def spares(self, start: AnyPlan, current: AnyPlan) -> bool:
        """Return whether the plan in force gains so little that the first one would do.

        The limit is half the gain that brings a plan in, so that plans do not go to and fro.
        """
        return start.predicted <= current.predicted * (1 + self.min_gain / 2)

    def slower(self, outcome: Outcome, expected: float) -> bool:
        """Return whether a change of plan has clearly made iterations slower.

        Args:
            outcome: measured seconds of an iteration.
            expected: seconds predicted for after it. A return to the first plan may be predicted
                to be slower, as it frees memory: then only clearly more than that is slower.
        """
        most = expected + self.min_gain * outcome.before
        return clearly_longer(outcome) and outcome.after > most


def over_budget(schedule: Schedule, budgets: tuple[float, ...], split: bool) -> str:
    """Describe why a `schedule` takes more memory than there is; "" where it does not.

    `budgets`: microbatches in flight, by worker. `split`: backwards may run in halves.
    """
    held = () if schedule.stock else schedule.peak_in_flight()
    over = [worker for worker, most in enumerate(held) if most > budgets[worker]]
    if over:
        first = over[0]
        return (
            f"{schedule.routes.name(first)} holds {held[first]:g} microbatches, its memory is for "
            f"{budgets[first]:.4g}"
        )
    if not split and any(op.kind is Kind.W for line in schedule.order for op in line):
        return "there is no memory for backwards in halves"
    return ""
