"""The common part of replanners: of one pipeline, and of several replicas."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from megatron_adaptra.adapt.schedules.change import AnyConditions, Change, K, P
from megatron_adaptra.adapt.schedules.decisions import why_undone
from megatron_adaptra.adapt.schedules.policy import ReplanPolicy
from megatron_adaptra.adapt.schedules.trials import Trials
from megatron_adaptra.adapt.trial import Outcome
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.routes import Path
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.measure.detect import DelayChart
from megatron_adaptra.measure.op_seconds import WINDOW
from megatron_adaptra.measure.replica_estimate import Changed
from megatron_adaptra.measure.report import StageReport
from megatron_adaptra.plan.pipeline.fixed.baselines import first_schedule

LEARN = 4  # iterations between two comparisons of the model with what it models
# Iterations after which it no longer counts that no plan gained enough from a change.
AGAIN = LEARN * WINDOW

K_co = TypeVar("K_co", bound=AnyConditions, covariant=True)


class Estimates(Protocol[K_co]):
    """An estimator measures what plans are made for: an Estimator or a ReplicaEstimator."""

    @property
    def budgets(self) -> tuple[float, ...]:
        """Microbatches in flight that each worker may have."""
        ...

    @property
    def split(self) -> bool:
        """True where backwards may run in halves."""
        ...

    @property
    def stock_extra(self) -> float:
        """The seconds by which an iteration with Megatron's own messages exceeds the model's."""
        ...

    @property
    def charts(self) -> Mapping[Path, DelayChart]:
        """The charts of the seconds that a message takes, by directed link."""
        ...

    def delays(self) -> dict[str, float]:
        """Return the seconds of every link that is measured now, by its name."""
        ...

    def alarms(self) -> list[str]:
        """Return the names of links and workers whose last sample is out of its chart."""
        ...

    def conditions(self, corrected: bool = True, native: bool = False) -> K_co:
        """Return the conditions to plan for.

        `corrected`: by what `learn` has shown. `native`: Megatron's own messages and step.
        """
        ...

    def accept(self) -> None:
        """Take present conditions as those that are planned for."""
        ...

    def state(self) -> dict[str, float]:
        """Return the seconds per link, `"1>2"`, that are planned for."""
        ...

    def learn(self, predicted: float, measured: float) -> None:
        """Take note of an iteration's `predicted` (uncorrected) and `measured` seconds."""
        ...

    def learn_stock(self, predicted: float, measured: float) -> None:
        """Take note of `predicted` and `measured` seconds, as `learn`, with Megatron's messages."""
        ...


class Replanner(ABC, Generic[P, K]):
    """A replanner feeds the estimator, and compares plans by the rule.

    For each iteration call `observe`, which a subclass has, then `propose`; once a change is
    decided, `swapped` or `failed`. Until then no other change is possible.

    Args:
        start: the schedule to come back to when nothing is slow.
        estimator: of what runs it.
        rule: by which plans are made and compared.

    `predicted`: seconds that the last iteration was expected to take, uncorrected; None where that
    was not asked. `stays`: why what has changed has led to no plan, where that is worth a line; ""
    else.
    """

    def __init__(self, start: Schedule, estimator: Estimates[K], rule: ReplanPolicy) -> None:
        self.estimator, self.rule = estimator, rule
        self.predicted: float | None = None
        self.stays = ""
        self._start, self._in_force = start, start
        self._iteration = 0  # the last one
        self._over_budget = False  # a plan in force may take more memory than there is
        self._met = ""  # why no order but the start's is possible any more
        self._trials: Trials[P, K] = Trials(start, rule)
        # Changes to plan for, with the seconds and factors that the plan in force was made for.
        self._paths: dict[Path, float] = {}
        self._workers: dict[int, float] = {}

    def propose(
        self, iteration: int, changed: Changed, in_force: Schedule, possible: bool
    ) -> Change[P, K] | None:
        """Return a plan that is clearly better than the one in force, if there is one.

        Args:
            iteration: the last one that was observed.
            changed: from `observe`.
            in_force: the schedule that all ranks run.
            possible: a proposal can be made now; else what has changed is remembered.
        """
        self.stays = ""
        if self.rule.fixed:
            return None
        self._in_force, self._iteration = in_force, iteration
        before = iteration < self._trials.since  # of the plan before: what has changed shows again
        if before:
            changed = Changed([], [])
        self._remember(changed)
        if not possible:
            return None
        if self._met:
            return self._back_for_good()
        if self._over_budget and (change := self._for_memory()) is not None:
            return change
        if self._trials.slower is not None:
            return self._undo(*self._trials.slower)
        return None if before else self._replan(changed.any)

    def swapped(self, change: Change[P, K], iteration: int) -> None:
        """Take note that `change` is in force from `iteration` on."""
        self._trials.swapped(change, iteration)
        self._forget()
        if (undone := change.undoes) is not None and undone.retry:
            self._remember_again(undone)  # once it is not blocked any more

    def failed(self, change: Change[P, K]) -> None:
        """Take note that `change` does not come into force, though its reason still stands."""
        if change.retry:
            self._remember_again(change)

    @abstractmethod
    def stock(self) -> Timeline:
        """Simulate unchanged Megatron under present conditions."""

    @abstractmethod
    def simulated(self, schedule: Schedule, conditions: K) -> P:
        """Simulate a `schedule` under `conditions`, with the rule's kind of messages."""

    @abstractmethod
    def _replan(self, changed: bool) -> Change[P, K] | None:
        """Return a better plan, where there is a reason for one.

        `changed`: something has changed just now; else an earlier change may wait for a plan.
        """

    @abstractmethod
    def _choose(self, conditions: K) -> P:
        """Return the plan for `conditions`: the start where no other is clearly faster."""

    @abstractmethod
    def _way_back(self, current: P, plan: P, to_start: bool) -> str:
        """Describe the return from the `current` plan to a `plan` from before, for people."""

    @abstractmethod
    def _why_spared(self, current: P, start: P) -> str:
        """Describe why the `start` comes back: the `current` plan gains too little now."""

    def _remember(self, changed: Changed) -> None:
        """Keep the paths that have `changed`, to plan for them."""
        charts = self.estimator.charts if changed.paths else {}
        for path in changed.paths:
            self._paths.setdefault(path, charts[path].level or 0.0)

    def _forget(self) -> None:
        """Drop all changes: they are planned for."""
        self._paths, self._workers = {}, {}

    def _remember_again(self, change: Change[P, K]) -> None:
        """Keep again the links and workers that a `change` was for, which are not planned for.

        One that has changed again since then keeps its value from before both changes.
        """
        self._paths |= change.links
        self._workers |= change.workers

    def _learn(self, ran: Schedule, seconds: float) -> None:
        """Compare what an iteration of `ran` has taken with what the model says."""
        plain = self.estimator.conditions(corrected=False, native=ran.stock)
        self.predicted = self.simulated(ran, plain).predicted
        learn = self.estimator.learn_stock if ran.stock else self.estimator.learn
        learn(self.predicted, seconds)

    def _accept(self) -> None:
        """Take present conditions as those that are planned for."""
        self.estimator.accept()

    def _postponed(self, changed: bool) -> bool:
        """Return whether changes, of which some came just now (`changed`), are to wait."""
        postponed = self._trials.postpones(self._in_force, self._iteration, LEARN)
        if changed and self._trials.blocks_any(self._iteration):
            self._accept()
        return postponed

    def _undo(self, change: Change[P, K], outcome: Outcome) -> Change[P, K]:
        """Go back to the plan before, which was faster by measured seconds."""
        c = self.estimator.conditions()
        plan, current = (
            replace(evaluated, extra=seconds - evaluated.timeline.makespan)
            for evaluated, seconds in (
                (self._evaluate(change.current.schedule, c), outcome.before),
                (self._evaluate(self._in_force, c), outcome.after),
            )
        )
        back = self._way_back(current, plan, plan.schedule.same_as(self._start))
        why = why_undone(outcome.after, outcome.before, back)
        again = self._trials.until(change.plan.schedule)
        return Change(why, plan, current, c, trial=False, undoes=change, again=again)

    def _take_meetings(self, reports: Iterable[StageReport]) -> None:
        self._met = self._met or next((report.met for report in reports if report.met), "")

    def _back_for_good(self) -> Change[P, K] | None:
        """Go back to the start: ops have met ranks of replicas that may run another order."""
        now = self._in_force
        if now.same_as(self._start):
            if self._paths or self._workers:
                self.stays = f"what has changed leads to no other order of ops: {self._met}"
            return None
        c = self.estimator.conditions()
        plan, current = self._evaluate(self._start, c), self._evaluate(now, c)
        back = self._way_back(current, plan, to_start=True)
        return Change(f"{self._met}: {back}, for good", plan, current, c, trial=False)

    def _for_memory(self) -> Change[P, K] | None:
        """Change to a plan that fits in memory, whose size is known in microbatches by now."""
        now, budgets = self._in_force, self.estimator.budgets
        if now.chunks == 1 and not self._start.stock:  # Megatron's own is what it is
            least = [min(budgets[stage :: now.stages]) for stage in range(now.stages)]
            one = first_schedule(now.stages, now.microbatches, least)
            self._start = self._trials.start = one.replicated(now.replicas)
        why = _over(now, budgets, self.estimator.split)
        self._over_budget = bool(why)  # until a plan that fits is in force
        if not why:
            return None
        c = self.estimator.conditions()
        return Change(why, self._choose_at_once(c), self._evaluate(now, c), c, trial=False)

    def _choose_at_once(self, conditions: K) -> P:
        """Return a plan that may come into force before anything else is measured."""
        return self._choose(conditions)

    def _reconsider(self) -> Change[P, K] | None:
        """Go back to the start if the plan in force, made from a few samples, gains too little."""
        began = time.perf_counter()
        now = self._in_force
        if now.same_as(self._start) or self._trials.blocks_leaving(now, self._iteration):
            return None
        c = self.estimator.conditions()
        current, start = self._evaluate(now, c), self._evaluate(self._start, c)
        if not self.rule.spares(start, current):
            return None
        why = self._why_spared(current, start)
        return Change(why, start, current, c, time.perf_counter() - began)

    def _evaluate(self, schedule: Schedule, conditions: K) -> P:
        """Simulate a `schedule` under `conditions`; Megatron's own under those of its messages."""
        if not schedule.stock:
            return self.simulated(schedule, conditions)
        plan = self.simulated(schedule, self.estimator.conditions(native=True))
        return replace(plan, extra=self._stock_extra(plan))

    def _stock_extra(self, plan: P) -> float:
        """Return the seconds that Megatron's own messages add to an iteration of their `plan`."""
        return self.estimator.stock_extra


def _over(schedule: Schedule, budgets: tuple[float, ...], split: bool) -> str:
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
