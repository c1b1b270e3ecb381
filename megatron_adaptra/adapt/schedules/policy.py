"""Changes of plan: which are worth a swap, and which are taken back after a trial."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

from megatron_adaptra.adapt.trial import (
    Backoff,
    History,
    Measured,
    Outcome,
    Trial,
    clearly_longer,
)
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.routes import Path
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.measure.report import StageReport
from megatron_adaptra.plan import Plan, evaluate, make_plan
from megatron_adaptra.plan.routes.reroute import ReplicaPlan

RECOVERED = 0.25  # share of what a message took on a slow link; it takes less on one that is not

EXECUTOR = "--adaptra-engine executor"

AnyPlan = Plan | ReplicaPlan
AnyConditions = Conditions | ReplicaConditions

P = TypeVar("P", bound=AnyPlan)
K = TypeVar("K", bound=AnyConditions)


def executor_flags(recompute: bool) -> str:
    """Return the flags of the executor; `recompute`: its plans may run forwards again."""
    return f"{EXECUTOR} --adaptra-recompute" if recompute else EXECUTOR


@dataclass(frozen=True)
class ReplanPolicy:
    """A replan policy decides when to swap, and to what.

    `min_gain`: share of an iteration that a new plan has to save. `policy`: of the planner, by name
    (`plan.make_plan`). `fixed`: no plan is made. `sends`: "eager" or "rendezvous"; `stock_sends`:
    those of Megatron's own messages. `ahead`: see `lower`. `halves`: microbatches for which a stage
    must have room besides, so that backwards may run in halves.
    """

    min_gain: float = 0.15
    policy: str = "warmup"
    fixed: bool = False
    sends: str = "rendezvous"
    ahead: int | None = None
    halves: float = 0.0
    stock_sends: str = "rendezvous"

    def evaluate(self, schedule: Schedule, conditions: Conditions) -> Plan:
        """Compute what an iteration of the schedule takes.

        The delay of Megatron's own messages counts from when both sides are there, so that it
        contains the handshake between them.
        """
        if schedule.stock:
            return evaluate(schedule, conditions, "eager", 0)
        return evaluate(schedule, conditions, self.sends, self.ahead)

    def sends_of_stock(self, measured: bool) -> str:
        """Return how Megatron's own messages move: "eager" or "rendezvous".

        `measured`: their delay is known apart from ours, and contains the handshake of both sides.
        """
        return "eager" if measured else self.stock_sends

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


@dataclass(frozen=True)
class Change(Generic[P, K]):
    """A plan to swap to. Ends of links are workers: stages, where there is one pipeline.

    Args:
        why: a sentence.
        plan: what comes.
        current: what is in force.
        conditions: what it is planned for.
        seconds: that planning took.
        links: that it is for, with the seconds that a message took there before.
        workers: that it is for, with how many times as long as their peers they took before.
        retry: these have to be planned for again if it does not come into force.
        trial: if iterations turn out slower, the plan before comes back.
        undoes: the change that has made them slower.
        again: the iteration from which on that is tried again; None where it undoes none.
        tries: workers that get a microbatch to show what they take.
        recovered: nothing that it is for is slow any more, and the start comes back.
    """

    why: str
    plan: P
    current: P
    conditions: K
    seconds: float = 0.0
    links: Mapping[Path, float] = field(default_factory=dict)
    workers: Mapping[int, float] = field(default_factory=dict)
    retry: bool = False
    trial: bool = True
    undoes: Change[P, K] | None = None
    again: int | None = None
    tries: tuple[int, ...] = ()
    recovered: bool = False


def has_recovered(before: float, now: float) -> bool:
    """Return whether a message that takes `now` seconds, `before` these, is on a healthy link."""
    return now <= RECOVERED * before


def was(seconds: float) -> str:
    """Describe the `seconds` that a message took before a change, to end a sentence."""
    return f"before {1e3 * seconds:.3g} ms" if seconds else "from the start"


def frees(current: AnyPlan, plan: AnyPlan) -> str:
    """Describe the memory that the `current` plan holds beyond `plan`, to end a sentence."""
    held = zip(current.peak_in_flight, plan.peak_in_flight, strict=True)
    most = max(now - then for now, then in held)
    if most <= 0:
        return ""
    noun = "microbatch" if most == 1 else "microbatches"
    return f", which frees the memory of up to {most:.3g} {noun} on a stage"


class Trials(Generic[P, K]):
    """A set of trials finds the change that has made iterations slower, and blocks its kind.

    The control of a plan is the time that the forward of a microbatch takes: stages on which it
    takes longer explain slower iterations.

    Args:
        start: the schedule to come back to; changes to it and from it are kinds of their own.
        rule: decides what is slower.

    `since`: the first iteration of the plan in force. `slower`: the change that is to be undone,
    and what was measured.
    """

    def __init__(self, start: Schedule, rule: ReplanPolicy) -> None:
        self.start, self.since = start, 0
        self.slower: tuple[Change[P, K], Outcome] | None = None
        self._rule = rule
        self._history: History[Measured] = History()
        self._last: tuple[int, float] | None = None  # observed: its number, and its control
        # In force, not yet compared with what was before.
        self._trial: tuple[Change[P, K], Trial] | None = None
        self._to_start, self._from_start = Backoff(), Backoff()

    def observe(
        self, iteration: int, reports: Collection[StageReport], seconds: float | None, changed: bool
    ) -> None:
        """Compare the iterations on a new plan with those before, once there are enough.

        Args:
            iteration: its number.
            reports: of all workers.
            seconds: of the iteration before; None if not known.
            changed: something is other than before, so that a comparison shows nothing of the plan.
        """
        last, self._last = self._last, (iteration, _forward_seconds(reports))
        if seconds is not None and last is not None and last[0] == iteration - 1:
            self._history.add(iteration - 1, Measured(seconds, last[1]))
        if self._trial is None or iteration < self.since:
            return
        change, trial = self._trial
        if changed:
            self._trial = None
            return
        trial.judge(iteration, *self._history.around(self.since))
        if trial.failed is not None:
            self.slower = change, trial.failed
        if trial.over:
            self._trial = None

    def _is_slower(self, change: Change[P, K], outcome: Outcome) -> bool:
        expected = outcome.before + change.plan.predicted - change.current.predicted
        return self._rule.slower(outcome, expected)

    def swapped(self, change: Change[P, K], iteration: int) -> None:
        """Begin the trial of `change`, which is in force from `iteration` on."""
        self.since = iteration
        self._trial = self.slower = None
        if change.trial:
            backoff = self.backoff(change.plan.schedule)
            self._trial = change, Trial(iteration, backoff, partial(self._is_slower, change))

    def backoff(self, schedule: Schedule) -> Backoff:
        """Return what blocks the kind of plan of a `schedule`."""
        return self._to_start if schedule.same_as(self.start) else self._from_start

    def blocks_leaving(self, schedule: Schedule, iteration: int) -> bool:
        """Return whether a change from `schedule` to another kind is blocked in `iteration`."""
        at_start = schedule.same_as(self.start)
        return (self._from_start if at_start else self._to_start).blocks(iteration)

    def blocks_any(self, iteration: int) -> bool:
        """Return whether some kind of plan is blocked in this `iteration`."""
        return self._to_start.blocks(iteration) or self._from_start.blocks(iteration)


def _forward_seconds(reports: Collection[StageReport]) -> float:
    """Return the seconds of a microbatch's forward on the slowest stage, by the wall clock.

    On crowded cores that grows with what else runs there, which is no fault of a plan. A plan may
    itself make backwards longer: it runs them in halves, or forwards again.
    """
    return max(report.wall.get("F", 0.0) for report in reports)


def no_gain(now: float, best: float, min_gain: float) -> str:
    """Describe why the plan in force stays, by the seconds of an iteration `now` and of the `best`.

    `min_gain`: see ReplanPolicy.
    """
    if best >= now:
        return f"no plan is faster than the one in force, whose iterations take {1e3 * now:.4g} ms"
    return (
        f"the plan in force stays: an iteration takes {1e3 * now:.4g} ms, by the best plan "
        f"{1e3 * best:.4g} ({1 - best / now:.1%} less, {min_gain:.0%} are needed)"
    )


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
