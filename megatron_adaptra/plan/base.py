"""What a planner returns, and the table of planners."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_adaptra.errors import BadInput
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.program import Program, lower
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.ir.timeline import Timeline
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
        """Seconds of an iteration, the optimizer step included."""
        return self.timeline.makespan

    @property
    def gap(self) -> float:
        """How much of the lower bound the plan lies above it; no schedule gains more than that."""
        return self.predicted / self.lower_bound - 1 if self.lower_bound else 0.0

    def to_json(self) -> dict[str, Any]:
        """The object that `adaptra plan --json` prints, less what compares it with stock."""
        return {
            "policy": self.schedule.policy,
            "why": self.schedule.why,
            "warmup": list(self.schedule.warmup),
            "stages": [[str(op) for op in line] for line in self.schedule.order],
            "predicted_ms": 1e3 * self.predicted,
            "lower_bound_ms": 1e3 * self.lower_bound,
            "gap": self.gap,
            "peak_in_flight": list(self.peak_in_flight),
        }


# (conditions, kind of sends, seconds it may search or None for its own measure) -> schedule
Planner = Callable[[Conditions, str, float | None], Schedule]
PLANNERS: dict[str, Planner] = {}


def planner(name: str) -> Callable[[Planner], Planner]:
    """Register a planner as policy `name`.

    It is a pure function, as long as no time limit cuts it short.
    """

    def register(function: Planner) -> Planner:
        PLANNERS[name] = function
        return function

    return register


def make_plan(
    conditions: Conditions,
    policy: str = "adaptive",
    sends: str = "eager",
    time_limit: float | None = None,
    ahead: int | None = None,
) -> Plan:
    """Plan with `policy`; the same conditions give the same bytes. Raises BadInput.

    `sends`: "eager" or "rendezvous". `ahead`: see `lower`. `time_limit`: seconds that a searching
    planner may take; what it finds then depends on the machine. Default: its own measure, counted
    in ops, so that every machine finds the same.
    """
    if policy not in PLANNERS:
        raise BadInput("policy", policy, f"one of {', '.join(sorted(PLANNERS))}")
    return evaluate(PLANNERS[policy](conditions, sends, time_limit), conditions, sends, ahead)


def evaluate(
    schedule: Schedule, conditions: Conditions, sends: str = "eager", ahead: int | None = None
) -> Plan:
    """A Plan for a schedule that is already there.

    `sends`: "eager" or "rendezvous". `ahead`: see `lower`.
    """
    program = lower(schedule, ahead)
    timeline = simulate(program, conditions, sends)
    bound = lower_bound(conditions)
    return Plan(schedule, program, timeline, bound, schedule.peak_in_flight())


def slow_links(conditions: Conditions) -> str:
    """How a planner's sentence begins."""
    slow = [
        f"{a}->{b} {1e3 * link.delay:.3g} ms"
        + (f" at {link.bandwidth / 1e6:.3g} MB/s" if math.isfinite(link.bandwidth) else "")
        for (a, b), link in sorted(conditions.links.items())
        if link.delay > 0 or math.isfinite(link.bandwidth)
    ]
    return f"slow links {'; '.join(slow)}: " if slow else "no slow link: "
