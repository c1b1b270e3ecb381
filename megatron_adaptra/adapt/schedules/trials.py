"""Changes of plan and their trials: the results, and the kinds of plan blocked for now."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from megatron_adaptra.adapt.schedules.policy import AnyPlan, ReplanPolicy
from megatron_adaptra.adapt.trial import Backoff, History, Measured, Outcome, Trial
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.routes import Path
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.measure.report import StageReport

AnyConditions = Conditions | ReplicaConditions

P = TypeVar("P", bound=AnyPlan)
K = TypeVar("K", bound=AnyConditions)


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

    def postpones(self, in_force: Schedule, iteration: int, every: int) -> bool:
        """Return whether changes are to wait, as a kind of plan is blocked in this `iteration`.

        New changes wait, too: the model's prediction has failed, and the next plan would be made by
        the same model. A link that flaps would bring in a slower plan each time. With a plan
        `in_force` that is not the start, one of `every` iterations does not wait.
        """
        if not self.blocks_any(iteration):
            return False
        only = in_force.same_as(self.start) and self._from_start.blocks(iteration)
        return only or iteration % every != 0


def _forward_seconds(reports: Collection[StageReport]) -> float:
    """Return the seconds of a microbatch's forward on the slowest stage, by the wall clock.

    On crowded cores that grows with what else runs there, which is no fault of a plan. A plan may
    itself make backwards longer: it runs them in halves, or forwards again.
    """
    return max(report.wall.get("F", 0.0) for report in reports)
