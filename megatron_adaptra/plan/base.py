"""What a planner returns, and the table of planners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_adaptra.errors import BadInput
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.program import Program, lower
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.ir.schedule import warmup_line as warmup_line  # planners import it here
from megatron_adaptra.ir.timeline import Timeline, peak_in_flight
from megatron_adaptra.model.bounds import lower_bound
from megatron_adaptra.sim.clock import simulate


@dataclass(frozen=True)
class Plan:
    """A schedule, what it should take, and how far from the best possible that is."""

    schedule: Schedule
    program: Program
    timeline: Timeline
    lower_bound: float
    peak_in_flight: tuple[float, ...]

    @property
    def predicted(self) -> float:
        return self.timeline.makespan

    def to_json(self) -> dict[str, Any]:
        """The object that `adaptra plan --json` prints, less what compares it with stock."""
        return {
            "policy": self.schedule.policy,
            "why": self.schedule.why,
            "warmup": list(self.schedule.warmup),
            "stages": [[str(op) for op in line] for line in self.schedule.order],
            "predicted_ms": 1e3 * self.predicted,
            "lower_bound_ms": 1e3 * self.lower_bound,
            "peak_in_flight": list(self.peak_in_flight),
        }


Planner = Callable[[Conditions, str], Schedule]
PLANNERS: dict[str, Planner] = {}


def planner(name: str) -> Callable[[Planner], Planner]:
    """Register a planner: a pure function of the conditions and the kind of sends."""

    def register(function: Planner) -> Planner:
        PLANNERS[name] = function
        return function

    return register


def make_plan(conditions: Conditions, policy: str = "adaptive", sends: str = "eager") -> Plan:
    """Plan with `policy`; the same conditions give the same bytes. Raises BadInput."""
    if policy not in PLANNERS:
        raise BadInput("policy", policy, f"one of {', '.join(sorted(PLANNERS))}")
    return evaluate(PLANNERS[policy](conditions, sends), conditions, sends)


def evaluate(schedule: Schedule, conditions: Conditions, sends: str = "eager") -> Plan:
    """A Plan for a schedule that is already there."""
    program = lower(schedule)
    timeline = simulate(program, conditions, sends)
    split = any(op.kind is Kind.I for line in schedule.order for op in line)
    bound = lower_bound(conditions, split, schedule.chunks)
    peaks = tuple(peak_in_flight(line, schedule.chunks) for line in schedule.order)
    return Plan(schedule, program, timeline, bound, peaks)
