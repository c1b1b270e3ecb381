"""What a planner returns, and the table of planners."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.program import Program, lower
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.model.bounds import lower_bound
from megatron_adaptra.plan.pipeline.search.job_shop import exact_times
from megatron_adaptra.plan.pipeline.search.search_budget import end_of, since, worked
from megatron_adaptra.sim.clock import simulate

K = TypeVar("K")  # conditions


@dataclass(frozen=True)
class Evaluated(ABC, Generic[K]):
    """A schedule, what it should take under some conditions, and how far from the best that is.

    Args:
        schedule: of a pipeline, or of several replicas.
        program: the same with its messages.
        timeline: as the simulator predicts it.
        conditions: what it was planned for.
        extra: seconds that it takes beyond its timeline, as measured.
    """

    schedule: Schedule
    program: Program
    timeline: Timeline
    conditions: K
    extra: float = 0.0

    @property
    @abstractmethod
    def lower_bound(self) -> float:
        """Seconds that no schedule can do without."""

    @cached_property
    def peak_in_flight(self) -> tuple[float, ...]:
        """Microbatches whose activations a worker holds at most, per worker."""
        return self.schedule.peak_in_flight()

    @property
    def predicted(self) -> float:
        """Seconds of an iteration, the optimizer step included."""
        return self.timeline.makespan + self.extra

    @property
    def gap(self) -> float:
        """How much of the lower bound the plan lies above it; no schedule gains more than that."""
        return self.predicted / self.lower_bound - 1 if self.lower_bound else 0.0


class Plan(Evaluated[Conditions]):
    """Of one pipeline."""

    @cached_property
    def lower_bound(self) -> float:
        return lower_bound(self.conditions)

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
SEARCHING = ("adaptive", "warmup")
FIXED = 4.0  # what is done to any plan, and to find one by a quick rule, in times of evaluating it
RANKED = 8.0  # the same, where plans have to be simulated to choose one


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
    planner may take, see `search_time`; what it finds then depends on the machine. Default: its own
    measure, counted in ops, so that every machine finds the same.
    """
    if policy not in PLANNERS:
        raise BadInput("policy", policy, f"it has to be one of {', '.join(sorted(PLANNERS))}")
    search = None if time_limit is None else search_time(conditions, sends, time_limit)
    schedule = PLANNERS[policy](conditions, sends, search)
    if search == 0 and policy in SEARCHING:
        schedule = replace(schedule, why=schedule.why + "; not searched, for want of time")
    return evaluate(schedule, conditions, sends, ahead)


def search_time(conditions: Conditions, sends: str, time_limit: float) -> float:
    """Seconds of a `time_limit` that a planner may search; 0 where only a quick rule has time.

    The rest goes to what is done to any plan. `sends`: see `make_plan`. Raises BadInput where that
    takes longer.
    """
    begun, (fixed, unit) = end_of(0.0), least_time(conditions, sends)
    if time_limit < fixed:
        allowed = f"plans of this size take {1.01 * fixed:.3g} s here without any search"
        raise BadInput("--time-limit", time_limit, allowed)
    rest = time_limit - fixed - since(begun)
    return rest if rest >= unit else 0.0


def least_time(conditions: Conditions, sends: str) -> tuple[float, float]:
    """Seconds that a plan takes here without any search, and what simulating one takes of that.

    It is found by a rule, simulated and proven, and so is stock. How long that takes on this
    machine a small job shows. `sends`: see `make_plan`.
    """
    stages, count = 4, 16
    even = (1.0,) * stages
    small = Conditions(count, even, even, even)
    taken = []
    for _ in range(3):
        start = worked(0.0)
        _ = evaluate(PLANNERS["zb-h1"](small, sends, None), small, sends).lower_bound
        taken.append(worked(start))
    cells = conditions.stages * conditions.microbatches * conditions.chunks
    unit = min(taken) * cells / (stages * count)
    return (FIXED if exact_times(conditions, sends) else FIXED + RANKED) * unit, unit


def evaluate(
    schedule: Schedule, conditions: Conditions, sends: str = "eager", ahead: int | None = None
) -> Plan:
    """A Plan for a schedule that is already there.

    `sends`: "eager" or "rendezvous". `ahead`: see `lower`.
    """
    program = lower(schedule, ahead)
    return Plan(schedule, program, simulate(program, conditions, sends), conditions)
