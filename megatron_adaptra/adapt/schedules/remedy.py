"""The common part of remedies by a schedule: of one pipeline, and of replicas with one plan."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Generic, cast

from megatron_adaptra.adapt.log import DecisionLog
from megatron_adaptra.adapt.loop import RECENT_ITERATIONS, Proposed, Remedy, Vote
from megatron_adaptra.adapt.schedules.advice import Advice
from megatron_adaptra.adapt.schedules.decisions import WARMUP, LinkChange, PlanDecision
from megatron_adaptra.adapt.schedules.policy import Change, K, P, ReplanPolicy, Trials, over_budget
from megatron_adaptra.adapt.schedules.status import DelayRows, status_of
from megatron_adaptra.adapt.trial import Outcome
from megatron_adaptra.agree.bundle import SCHEDULE, Bundle, scheduled
from megatron_adaptra.diagnose.finding import Places, Worker
from megatron_adaptra.diagnose.pipeline import PipelineDiagnosis
from megatron_adaptra.ir.routes import Path
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.measure.detect import differ
from megatron_adaptra.measure.estimate import Estimator
from megatron_adaptra.measure.link_estimates import LONGEST
from megatron_adaptra.measure.op_seconds import WINDOW
from megatron_adaptra.measure.replica_estimate import Changed, ReplicaEstimator
from megatron_adaptra.measure.report import StageReport
from megatron_adaptra.plan.pipeline.fixed import first_schedule

LEARN = 4  # iterations between two comparisons of the model with what it models
# Iterations after which it no longer counts that no plan gained enough from a change.
AGAIN = LEARN * WINDOW


class PlanRemedy(Remedy[StageReport, PlanDecision], Generic[P, K]):
    """A plan remedy changes the schedule of a pipeline, or that of replicas planned together.

    In each iteration it feeds its estimator (`measure`), and compares plans by the rule (`plan`).

    Args:
        start: the schedule to come back to when nothing is slow.
        estimator: of what runs it.
        rule: by which plans are made and compared.
        log: of decisions, and the record of the run.
        workers: all that report, by number.
        diagnosis: finds who is slow; None where nobody wants to know.

    `delays`: see DelayRows. `advice`: None in a job that acts. `predicted`: seconds that the last
    iteration was expected to take, uncorrected; None where that was not asked. `stays`: why what
    has changed has led to no plan, where that is worth a line; "" else. `about`: its subject.
    """

    explains = WARMUP
    advice: Advice | None = None

    def __init__(
        self,
        start: Schedule,
        estimator: Estimator | ReplicaEstimator,
        rule: ReplanPolicy,
        log: DecisionLog[PlanDecision],
        workers: Sequence[Worker],
        diagnosis: PipelineDiagnosis | None = None,
    ) -> None:
        super().__init__(len(start.order), log)
        self.estimator, self.rule = estimator, rule
        self.delays = DelayRows()
        self.predicted: float | None = None
        self.stays = self.about = ""
        self._start, self._in_force = start, start
        self._pipelines: Sequence[Estimator] = (
            estimator.estimators if isinstance(estimator, ReplicaEstimator) else [estimator]
        )
        self._places = Places(workers, start.stages, 0 if start.replicas > 1 else None)
        self._diagnosis = diagnosis
        self._change: Change[P, K]  # proposed last
        self._ran: dict[int, Schedule] = {}  # in recent iterations
        self._iteration = 0  # the last one
        self._seconds: deque[float] = deque(maxlen=2)  # of the last iterations
        self._over_budget = False  # a plan in force may take more memory than there is
        self._met = ""  # why no order but the start's is possible any more
        self._trials: Trials[P, K] = Trials(start, rule)
        self._swapped: Change[P, K] | None = None  # that came into force last
        self._held = False  # what has changed is dealt with, as ranks do not act
        self._held_for: tuple[dict[Path, float], dict[int, float]] = {}, {}  # until they do
        # Changes to plan for, with the seconds and factors that the plan in force was made for.
        self._paths: dict[Path, float]
        self._workers: dict[int, float]
        self._forget()

    # As the loop calls it.

    def start(self, vote: Vote) -> None:
        super().start(vote)
        self.log.record.run(
            vote.first, start=self._start.to_json(), now=vote.in_force[SCHEDULE].to_json(),
            delays=self.estimator.delays(), rule=asdict(self.rule), **self._settings(),
        )  # fmt: skip

    def begins(self, iteration: int, bundle: Bundle) -> None:
        self._ran[iteration] = bundle[SCHEDULE]
        self._ran.pop(iteration - RECENT_ITERATIONS, None)

    def sender(self, report: StageReport) -> int:
        return report.worker

    def observe(
        self, iteration: int, row: Mapping[int, StageReport]
    ) -> Proposed[PlanDecision] | None:
        self._places.see(row)
        self._log_outcome(iteration, row)
        if iteration == self.vote.first:
            return None  # allocators and caches warm up
        ran = self._ran.pop(iteration - 1, None)
        changed = self.measure(iteration, row, ran)
        if self._diagnosis is not None and self.estimator.known:
            self._diagnosis.update(iteration, self._usable(row), self.estimator)
        for pipeline in self._pipelines:
            if pipeline.unmet:
                self.vote.note(pipeline.unmet)
        self.delays.keep(iteration, self.estimator.delays())
        if ran is not None and self.predicted is not None:
            self._refresh_prediction(iteration, ran, self.predicted)
        in_force, possible = self.vote.in_force[SCHEDULE], self.vote.can_propose(iteration)
        change = self.plan(iteration, changed, in_force, possible)
        if self.stays:
            self.vote.note(self.stays, self.about)
        if change is not None:
            return self._proposed(change)
        return self._prepare() if possible else None

    def observed(self, iteration: int, row: Mapping[int, StageReport]) -> None:
        status = status_of(iteration, self.estimator, self.log, measured=bool(self.delays))
        self.vote.publish(status)
        self.log.record.iteration(iteration, list(row.values()), status)
        if self.advice is not None and self._seconds and iteration % LEARN == 0:
            self.advice.on_small_collectives(self._pipelines, max(self._seconds), self.vote.note)

    def switched(self, decision: PlanDecision, before: PlanDecision | None) -> None:
        self.swapped(self._change, decision.iteration)

    def refused(self) -> None:
        self._remember_again(self._change)

    def back(self, why: str) -> Proposed[PlanDecision] | None:
        self._in_force = self.vote.in_force[SCHEDULE]
        if self._in_force.same_as(self._start) or not self.estimator.known:
            return None
        return self._proposed(self._to_start(why, undoes=self._swapped))

    def held(self, decision: PlanDecision) -> None:
        self._held, change, (paths, workers) = True, self._change, self._held_for
        if change.retry:  # others are found again
            self._held_for = {**change.links, **paths}, {**change.workers, **workers}

    def resume(self) -> None:
        (paths, workers), self._held_for, self._held = self._held_for, ({}, {}), False
        self._workers |= workers
        for path, old in paths.items():  # some may be as they were by now
            if differ(old, self._conditions().message_seconds(*path)):
                self._paths[path] = old

    def close(self) -> None:
        self.log.settle()  # later runs have the same log

    # Plans, without a log and a vote.

    def state(self) -> dict[str, float]:
        """Return the seconds, by link within a replica, to go on from after a restart."""
        return self.estimator.state()

    def measure(
        self, iteration: int, rows: Mapping[int, StageReport], ran: Schedule | None
    ) -> Changed:
        """Take the reports of an iteration; return what has changed for good, to plan for.

        Args:
            iteration: its number.
            rows: by worker; some may be missing.
            ran: the schedule of the iteration before, whose seconds the reports have; None where
                that is not known any more.
        """
        self.predicted = None
        self._met = self._met or next((one.met for one in rows.values() if one.met), "")
        if not (rows := self._usable(rows)):
            return Changed([], [])
        # Those of the slowest replica count.
        seconds = max((s for s in self._seconds_of(rows) if 0 < s < LONGEST), default=None)
        changed = self._update(rows)
        self._trials.observe(iteration, list(rows.values()), seconds, changed.any)
        if seconds is not None:
            self._seconds.append(seconds)
            if ran is not None and self.estimator.known and self._learns(iteration, ran):
                plain = self._conditions(corrected=False, native=ran.stock)
                self.predicted = self.evaluate(ran, plain).predicted
                learn = self.estimator.learn_stock if ran.stock else self.estimator.learn
                learn(self.predicted, seconds)
        return changed

    def plan(
        self, iteration: int, changed: Changed, in_force: Schedule, possible: bool
    ) -> Change[P, K] | None:
        """Return a plan that is clearly better than the one in force, if there is one.

        Args:
            iteration: the last one that was measured.
            changed: from `measure`.
            in_force: the schedule that all ranks run.
            possible: a proposal can be made now; else what has changed is remembered.
        """
        self.stays = self.about = ""
        if self.rule.fixed or not self.estimator.known:
            return None
        self._in_force, self._iteration = in_force, iteration
        before = iteration < self._trials.since  # of the plan before: what has changed shows again
        if before:
            changed = Changed([], [])
        self._remember(changed)
        self._held &= not changed.any
        if not possible or self._held:
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
        self._swapped = change
        self._forget()
        if change.undoes is not None:
            self._remember_again(change.undoes)  # once it is not blocked any more

    @abstractmethod
    def evaluate(self, schedule: Schedule, conditions: K) -> P:
        """Simulate a `schedule` under `conditions`, with the rule's kind of messages."""

    @abstractmethod
    def stock(self) -> Timeline:
        """Simulate unchanged Megatron under present conditions."""

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """Return what a replay needs to know beside the start and the rule."""

    @abstractmethod
    def _update(self, rows: Mapping[int, StageReport]) -> Changed:
        """Show the estimator an iteration; return what has changed for good."""

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

    def _usable(self, rows: Mapping[int, StageReport]) -> Mapping[int, StageReport]:
        """Return those of the reports whose values are possible."""
        return rows

    def _learns(self, iteration: int, ran: Schedule) -> bool:
        """Return whether to simulate what `ran`: it takes a while; training launches less then."""
        return iteration % LEARN == 0

    def _prepare(self) -> Proposed[PlanDecision] | None:
        """Propose a change that a plan needs before it can be proposed itself, if there is one."""
        return None

    def _choose_at_once(self, conditions: K) -> P:
        """Return a plan that may come into force before anything else is measured."""
        return self._choose(conditions)

    def _stock_extra(self, plan: P) -> float:
        """Return the seconds that Megatron's own messages add to an iteration of their `plan`."""
        return self.estimator.stock_extra

    def _conditions(self, corrected: bool = True, native: bool = False) -> K:
        return cast("K", self.estimator.conditions(corrected, native))

    def _remember(self, changed: Changed) -> None:
        """Keep the paths that have `changed`, to plan for them."""
        charts = self.estimator.charts if changed.paths else {}
        for path in changed.paths:
            self._paths.setdefault(path, charts[path].level or 0.0)

    def _forget(self) -> None:
        """Drop all changes: they are planned for."""
        self._paths, self._workers = {}, {}

    def _remember_again(self, change: Change[P, K]) -> None:
        """Keep what a `change` was for, if that is still to be planned for.

        What has changed again since then keeps its value from before both changes.
        """
        if change.retry:
            self._paths |= change.links
            self._workers |= change.workers

    def _accept(self) -> None:
        """Take present conditions as those that are planned for."""
        self.estimator.accept()

    def _postponed(self, changed: bool) -> bool:
        """Return whether changes, of which some came just now (`changed`), are to wait.

        New ones wait, too, while a kind of plan is blocked: the model's prediction has failed, and
        a link that flaps would bring in a slower plan each time. With another plan in force than
        the start, one of LEARN iterations does not wait.
        """
        now, iteration = self._in_force, self._iteration
        blocked = self._trials.blocks_any(iteration)
        if changed and blocked:
            self._accept()
        only = now.same_as(self._start) and self._trials.blocks_leaving(now, iteration)
        return blocked and (only or iteration % LEARN != 0)

    def _undo(self, change: Change[P, K], outcome: Outcome) -> Change[P, K]:
        """Go back to the plan before, which was faster by measured seconds."""
        c = self._conditions()
        each = [self._evaluate(one, c) for one in (change.current.schedule, self._in_force)]
        plan, current = (
            replace(one, extra=seconds - one.timeline.makespan)
            for one, seconds in zip(each, outcome, strict=True)
        )
        back = self._way_back(current, plan, plan.schedule.same_as(self._start))
        before, after = (f"{1e3 * seconds:.4g} ms" for seconds in outcome)
        why = f"iterations take {after}, on the plan before {before}: {back}"
        again = self._trials.backoff(change.plan.schedule).until
        return Change(why, plan, current, c, trial=False, undoes=change, again=again)

    def _back_for_good(self) -> Change[P, K] | None:
        """Go back to the start: ops have met ranks of replicas that may run another order."""
        now = self._in_force
        if now.same_as(self._start):
            if self._paths or self._workers:
                self.stays = f"what has changed leads to no other order of ops: {self._met}"
            return None
        return self._to_start(self._met, ", for good")

    def _to_start(
        self, why: str, end: str = "", undoes: Change[P, K] | None = None
    ) -> Change[P, K]:
        """Go back to the start because of `why`. `end`: of the sentence. `undoes`: see Change."""
        c = self._conditions()
        plan, current = self._evaluate(self._start, c), self._evaluate(self._in_force, c)
        why = f"{why}: {self._way_back(current, plan, to_start=True)}{end}"
        return Change(why, plan, current, c, trial=False, undoes=undoes)

    def _for_memory(self) -> Change[P, K] | None:
        """Change to a plan that fits in memory, whose size is known in microbatches by now."""
        now, budgets = self._in_force, self.estimator.budgets
        if now.chunks == 1 and not self._start.stock:  # Megatron's own is what it is
            least = [min(budgets[stage :: now.stages]) for stage in range(now.stages)]
            one = first_schedule(now.stages, now.microbatches, least)
            self._start = self._trials.start = one.replicated(now.replicas)
        why = over_budget(now, budgets, self.estimator.split)
        self._over_budget = bool(why)  # until a plan that fits is in force
        if not why:
            return None
        c = self._conditions()
        return Change(why, self._choose_at_once(c), self._evaluate(now, c), c, trial=False)

    def _reconsider(self) -> Change[P, K] | None:
        """Go back to the start if the plan in force, made from a few samples, gains too little."""
        began = time.perf_counter()
        now = self._in_force
        if now.same_as(self._start) or self._trials.blocks_leaving(now, self._iteration):
            return None
        c = self._conditions()
        current, start = self._evaluate(now, c), self._evaluate(self._start, c)
        if not self.rule.spares(start, current):
            return None
        why = self._why_spared(current, start)
        return Change(why, start, current, c, time.perf_counter() - began)

    def _evaluate(self, schedule: Schedule, conditions: K) -> P:
        """Simulate a `schedule` under `conditions`; Megatron's own under those of its messages."""
        if not schedule.stock:
            return self.evaluate(schedule, conditions)
        plan = self.evaluate(schedule, self._conditions(native=True))
        return replace(plan, extra=self._stock_extra(plan))

    # For the log, charts and the record.

    def _log_outcome(self, iteration: int, rows: Mapping[int, StageReport]) -> None:
        """Log what the iteration before has taken, by the reports of this one."""
        if seconds := self._seconds_of(rows):
            self.log.outcome(iteration - 1, max(seconds))

    def _seconds_of(self, rows: Mapping[int, StageReport]) -> list[float]:
        """Return the seconds of the iteration before, of each replica that knows them."""
        first = [report for worker, report in rows.items() if worker % self._start.stages == 0]
        return [report.seconds for report in first if report.seconds is not None]

    def _proposed(self, change: Change[P, K]) -> Proposed[PlanDecision]:
        """Propose a `change`, with the reason for the log."""
        c, plan, schedule = change.conditions, change.plan, change.plan.schedule
        self._change, bundle, end = change, scheduled(schedule), self._places.at
        links = []
        for (a, b), old in change.links.items():
            now, wire = c.link(a, b), c.wire(a, b)
            times, bandwidth = (1e3 * old, 1e3 * now.delay, 1e3 * wire), now.bandwidth
            links.append(LinkChange(end(a, b), end(b, a), *times, bandwidth if wire else None))
        decision = PlanDecision(
            kinds=bundle.names,
            links=links,
            why=change.why,
            warmup_before=list(self._in_force.warmup),
            warmup_after=list(schedule.warmup),
            predicted_ms=1e3 * plan.predicted,
            predicted_without_ms=1e3 * change.current.predicted,
            stock=self.stock(),
            lower_bound_ms=1e3 * plan.lower_bound,
            planning_ms=1e3 * change.seconds,
            digest=schedule.digest(),
            plan=schedule.text(),
            conditions=c.to_json(),
            again=change.again,
            recovered=change.recovered,
            answers=[] if self._diagnosis is None else self._diagnosis.answers(change),
        )
        return Proposed(bundle, decision)

    def _refresh_prediction(self, iteration: int, ran: Schedule, predicted: float) -> None:
        """Log `predicted` once the model knows only what was measured under the plan that `ran`."""
        last = self.log.last
        if last is None or last.refreshed_ms is not None or last.digest != ran.digest():
            return
        if iteration > last.iteration + WINDOW:
            last.refreshed_ms = 1e3 * predicted
            self.log.refresh(last, last.refreshed_ms)
