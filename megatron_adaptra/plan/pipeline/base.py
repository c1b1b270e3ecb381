"""Plans of pipelines, which planners return, and the table of planners."""

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
    """An evaluation predicts the time of a schedule, and its gap to the lower bound.

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
        """The most microbatches whose activations a worker holds, per worker."""
        return self.schedule.peak_in_flight()

    @property
    def predicted(self) -> float:
        """Seconds of an iteration, the optimizer step included."""
        return self.timeline.makespan + self.extra

    @property
    def gap(self) -> float:
        """The share of the lower bound that the plan takes beyond it; no schedule gains more."""
        return self.predicted / self.lower_bound - 1 if self.lower_bound else 0.0


class Plan(Evaluated[Conditions]):
    """A plan evaluates the schedule of one pipeline."""

    @cached_property
    def lower_bound(self) -> float:
        return lower_bound(self.conditions)

    def to_json(self) -> dict[str, Any]:
        """Return the object that `adaptra plan --json` prints, without the figures of stock."""
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
FIXED = 4.0  # the cost of any plan by a quick rule, in multiples of one evaluation
RANKED = 8.0  # the cost beyond that where plans have to be simulated to choose one


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
    """Return the seconds of a `time_limit` left for search; 0 if only a quick rule has time.

    The others go to the steps that each plan needs. `sends`: see `make_plan`. Raises BadInput where
    these take longer than the limit.
    """
    begun, (fixed, unit) = end_of(0.0), least_time(conditions, sends)
    if time_limit < fixed:
        allowed = f"plans of this size take {1.01 * fixed:.3g} s here without any search"
        raise BadInput("--time-limit", time_limit, allowed)
    rest = time_limit - fixed - since(begun)
    return rest if rest >= unit else 0.0


def least_time(conditions: Conditions, sends: str) -> tuple[float, float]:
    """Return the seconds of a plan without any search, and those of one evaluation.

    The plan is found by a rule, simulated and proven, and so is stock. A small job is timed to
    estimate both on this machine. `sends`: see `make_plan`.
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
    """Return a Plan for a schedule that is already there.

    `sends`: "eager" or "rendezvous". `ahead`: see `lower`.
    """
    program = lower(schedule, ahead)
    return Plan(schedule, program, simulate(program, conditions, sends), conditions)
