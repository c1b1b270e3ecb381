"""When to change the plan, and to what: from iteration to iteration, without threads or messages.

The replan loop asks it while a job trains, and a replay asks it again afterwards.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.plan import Plan, make_plan
from megatron_adaptra.plan.fixed.baselines import first_schedule
from megatron_adaptra.runtime.change import Change, PipelineChange
from megatron_adaptra.runtime.decisions import what_back, why_none, why_swap, why_undone
from megatron_adaptra.runtime.replan_policy import ReplanPolicy
from megatron_adaptra.runtime.trial import Outcome, Trials
from megatron_adaptra.sim.clock import simulate
from megatron_adaptra.telemetry.estimate import Estimator
from megatron_adaptra.telemetry.report import StageReport

LEARN = 4  # iterations between two comparisons of the model with what it models

Link = tuple[int, int]


class Replanner:
    """Feeds the estimator, and compares plans by the rule.

    For each iteration call `observe`, then `propose`; once a change is decided, `swapped` or
    `failed`. Until then nothing else is possible.

    Args:
        start: the schedule to come back to when no link is slow.
        estimator: of the pipeline.
        rule: by which plans are made and compared.

    `predicted`: seconds that the last iteration was expected to take, uncorrected; None where that
    was not asked. `stays`: why a link that has changed has led to no plan, where that is worth a
    line; "" else.
    """

    def __init__(self, start: Schedule, estimator: Estimator, rule: ReplanPolicy) -> None:
        self.estimator, self.rule = estimator, rule
        self.predicted: float | None = None
        self.stays = ""
        self._start, self._in_force = start, start
        self._changed: dict[Link, float] = {}  # links not yet planned for, with their old delays
        self._over_budget = False  # a plan in force may take more memory than there is
        self._iteration = 0  # the last one
        self._seconds: deque[float] = deque(maxlen=2)  # of the last iterations
        self._trials: Trials[Plan, Conditions] = Trials(start, rule)

    def observe(
        self, iteration: int, reports: Sequence[StageReport], ran: Schedule | None
    ) -> list[Link]:
        """Take the reports of an iteration.

        Args:
            iteration: its number.
            reports: one per stage, by stage.
            ran: the schedule of the iteration before, whose seconds the reports have; None where
                that is not known any more.

        Returns:
            The links whose delays have changed for good, to plan for.
        """
        seconds = reports[0].seconds
        if seconds is not None:
            self._seconds.append(seconds)
        changed = self.estimator.update(reports)
        self._trials.observe(iteration, reports, seconds, bool(changed))
        self._over_budget |= self.estimator.measure_budget(reports)
        self.predicted = None
        # To simulate an iteration takes a while, in which training launches less.
        often = ran is not None and ran.stock and self.estimator.stock_delay > 0
        if ran is not None and seconds is not None and (often or iteration % LEARN == 0):
            plain = self.estimator.conditions(corrected=False, native=ran.stock)
            self.predicted = self.rule.evaluate(ran, plain).predicted
            learn = self.estimator.learn_stock if ran.stock else self.estimator.learn
            learn(self.predicted, seconds)
        return changed

    def propose(
        self, iteration: int, changed: Iterable[Link], in_force: Schedule, possible: bool
    ) -> PipelineChange | None:
        """A plan that is clearly better than the one in force, if there is one.

        Args:
            iteration: the last one that was observed.
            changed: links, as from `observe`.
            in_force: the schedule that all ranks run.
            possible: a proposal can be made now; else the links are remembered.
        """
        self.stays = ""
        if self.rule.fixed:
            return None
        self._in_force = in_force
        self._iteration = iteration
        before = iteration < self._trials.since  # of the plan before: what has changed shows again
        changed = [] if before else list(changed)
        for link in changed:
            self._changed.setdefault(link, self.estimator.charts[link].level or 0.0)
        if not possible:
            return None
        if self._over_budget and (change := self._for_memory()) is not None:
            return change
        if self._trials.slower is not None:
            return self._undo(*self._trials.slower)
        if before:
            return None
        if self._changed and not self._postponed(bool(changed)):
            return self._for_links()
        if iteration % LEARN == 0 and self.estimator.calibrated:
            return self._reconsider()
        return None

    def swapped(self, change: PipelineChange, iteration: int) -> None:
        """`change` is in force from `iteration` on."""
        self._trials.swapped(change, iteration)
        self._changed = {}
        if (undone := change.undoes) is not None and undone.retry:
            self._changed = dict(undone.links)  # once it is not blocked any more

    def failed(self, change: PipelineChange) -> None:
        """It will not be: its reason still stands."""
        if change.retry:
            self._changed |= change.links

    def stock(self) -> Timeline:
        """What unchanged Megatron would do now: it posts a receive when it needs the message."""
        conditions = self.estimator.conditions(native=True)
        policy = "interleaved" if conditions.chunks > 1 else "1f1b"
        schedule = make_plan(conditions, policy, self.rule.sends).schedule
        return simulate(lower(schedule, 0), conditions, self.rule.sends)

    def _postponed(self, changed: bool) -> bool:
        """Whether links that have changed, some of them just now (`changed`), are to wait."""
        postponed = self._trials.postpones(self._in_force, self._iteration, LEARN)
        if changed and self._trials.blocks_any(self._iteration):
            self.estimator.accept()
        return postponed

    def _undo(self, change: PipelineChange, outcome: Outcome) -> PipelineChange:
        """The plan before was faster, by what iterations have taken, whatever was predicted."""
        conditions = self.estimator.conditions()
        plan, current = (
            replace(evaluated, extra=seconds - evaluated.timeline.makespan)
            for evaluated, seconds in (
                (self._evaluate(change.current.schedule, conditions), outcome.before),
                (self._evaluate(self._in_force, conditions), outcome.after),
            )
        )
        why = why_undone(current, plan, plan.schedule.same_as(self._start))
        return Change(why, plan, current, conditions, trial=False, undoes=change)

    def _for_links(self) -> PipelineChange | None:
        """Some delays have changed for good."""
        began = time.perf_counter()
        conditions = self.estimator.conditions()
        before, self._changed = self._changed, {}
        eased = any(conditions.message_seconds(*link) < before[link] for link in before)
        self.estimator.accept()
        current = self._evaluate(self._in_force, conditions)
        plan = self._choose(conditions)
        if not self.rule.worth(plan, current, eased):
            self.stays = why_none(before, conditions)
            return None
        if self._trials.blocks(plan.schedule, self._iteration):
            self._changed = before
            return None
        why = why_swap(before, conditions, current, plan, back=plan.schedule is self._start)
        return Change(
            why, plan, current, conditions, time.perf_counter() - began, before, retry=True
        )

    def _for_memory(self) -> PipelineChange | None:
        """What stages may hold has become known in microbatches: keep to it."""
        now, budgets = self._in_force, self.estimator.budgets
        if now.chunks == 1 and not self._start.stock:  # Megatron's own is what it is
            self._start = first_schedule(now.stages, now.microbatches, budgets)
            self._trials.start = self._start
        conditions = self.estimator.conditions()
        current = self._evaluate(now, conditions)
        held = [] if now.stock else current.peak_in_flight
        over = [s for s, most in enumerate(held) if most > budgets[s]]
        halved = not self.estimator.split and any(op.kind is Kind.W for op in chain(*now.order))
        self._over_budget = bool(over) or halved  # until a plan that fits is in force
        why = "there is no memory for backwards in halves"
        if over:
            first, may = over[0], budgets[over[0]]
            why = f"stage {first} holds {held[first]:g} microbatches, its memory is for {may:.4g}"
        if not self._over_budget:
            return None
        return Change(why, self._choose(conditions), current, conditions, trial=False)

    def _reconsider(self) -> PipelineChange | None:
        """Whether the plan in force is still needed: it was made from a few hasty samples."""
        began = time.perf_counter()
        at_start = self._in_force.same_as(self._start)
        blocked = self._trials.blocks_leaving(self._in_force, self._iteration)
        if blocked or (at_start and self.estimator.stock_extra == 0):
            return None
        conditions = self.estimator.conditions()
        current = self._evaluate(self._in_force, conditions)
        if at_start:
            # Perhaps it has only turned out by now how much Megatron's messages cost.
            if current.extra > self.rule.min_gain * current.predicted:
                return self._from_stock(conditions, current)
            return None
        start = self._evaluate(self._start, conditions)
        if not self.rule.spares(start, current):
            return None
        why = f"a deeper warmup gains too little now: {what_back(current, start)}"
        return Change(why, start, current, conditions, time.perf_counter() - began)

    def _from_stock(self, conditions: Conditions, current: Plan) -> PipelineChange | None:
        plan = self._choose(conditions)
        if not self.rule.worth(plan, current, eased=False):
            return None
        worst = max(conditions.links, key=lambda link: conditions.message_seconds(*link))
        why = why_swap({worst: 0.0}, conditions, current, plan, back=False)
        return Change(why, plan, current, conditions, links={worst: 0.0})

    def _choose(self, conditions: Conditions) -> Plan:
        """The policy's plan where it is clearly faster, else the first: memory is precious."""
        start = self._evaluate(self._start, conditions)
        plan = self.rule.make_plan(conditions)
        return plan if self.rule.gains(plan, start) else start

    def _evaluate(self, schedule: Schedule, conditions: Conditions) -> Plan:
        """What an iteration takes under `conditions`; what Megatron runs has links of its own."""
        if not schedule.stock:
            return self.rule.evaluate(schedule, conditions)
        plan = self.rule.evaluate(schedule, self.estimator.conditions(native=True))
        extra = self.estimator.stock_extra
        if self._in_force.stock:  # then nobody has to guess
            extra = min(extra, max(0.0, min(self._seconds, default=0.0) - plan.predicted))
        return replace(plan, extra=extra)
