"""When to change the plan of several replicas, and to what: without threads or messages.

The counterpart of `runtime.replanner`, for replicas that share one leader. Remedies are the
cheapest that suffice: deeper warmups where memory allows, then other partners, then microbatches
that run on another replica.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_adaptra.errors import BadInput
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.routes import Path, worker_name
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.plan.fixed.baselines import first_schedule
from megatron_adaptra.plan.replicas.one_back import one_back
from megatron_adaptra.plan.replicas.swaps import chain_schedules
from megatron_adaptra.plan.reroute import ReplicaPlan, evaluate_replicas, plan_replicas
from megatron_adaptra.runtime.replan_policy import ReplanPolicy
from megatron_adaptra.runtime.replanner import LEARN
from megatron_adaptra.runtime.replica_words import (
    why_change,
    why_spared,
    why_stays,
    why_tried,
    why_tried_enough,
    why_undone,
)
from megatron_adaptra.runtime.trial import FIRST_BLOCK, Backoff, Outcome, Trials
from megatron_adaptra.telemetry.detect import ABSOLUTE, RELATIVE
from megatron_adaptra.telemetry.link_estimates import LONGEST
from megatron_adaptra.telemetry.replica_estimate import Changed, ReplicaEstimator
from megatron_adaptra.telemetry.report import StageReport
from megatron_adaptra.telemetry.slow_workers import TRY_AGAIN

NO_ROUTES = "none"
MODES = (NO_ROUTES, "swap", "auto")
OPS = 200_000  # that a search for routes schedules at most: some 0.6 s, beside a training
NEAR = 0.01  # share of an iteration for which a cheaper remedy is taken
PATIENCE = 20  # iterations that probes of a cross path may take to show what it takes
RETRY = 8 * FIRST_BLOCK  # iterations after which one that showed nothing is probed again
LONGEST_WITHOUT_TRY = 400  # iterations
TRIED = 8  # iterations for which an idle worker gets a microbatch


@dataclass(frozen=True)
class ReplicaChange:
    """A plan for all replicas to swap to.

    Args:
        why: a sentence.
        plan: what comes.
        current: what is in force.
        conditions: what it is planned for.
        seconds: that planning took.
        paths: that it is for, with the seconds that a message took there before.
        workers: that it is for, with how many times as long as their peers they took before.
        retry: these have to be planned for again if it does not come into force.
        trial: if iterations turn out slower, the plan before comes back.
        undoes: the change that has made them slower.
        tries: workers that get a microbatch to show what they take.
    """

    why: str
    plan: ReplicaPlan
    current: ReplicaPlan
    conditions: ReplicaConditions
    seconds: float = 0.0
    paths: Mapping[Path, float] = field(default_factory=dict)
    workers: Mapping[int, float] = field(default_factory=dict)
    retry: bool = False
    trial: bool = True
    undoes: ReplicaChange | None = None
    tries: tuple[int, ...] = ()

    @property
    def links(self) -> Mapping[Path, float]:
        """The paths, by the name that they have in a Change."""
        return self.paths


class ReplicaReplanner:
    """Feeds the estimator, and compares plans by the rule.

    For each iteration call `observe`, then `propose`; once a change is decided, `swapped` or
    `failed`. Until then nothing else is possible.

    Args:
        start: of all replicas, each by itself; what to come back to when nobody is slow.
        estimator: of all workers.
        rule: by which plans are compared, and those of one pipeline are made.
        mode: "none": only warmups change; "swap": also whom a worker exchanges messages with;
            "auto": microbatches may run on other replicas, too. May be changed later.
        ops: that a search for routes may schedule.

    `predicted`: seconds that the last iteration was expected to take, uncorrected; None where that
    was not asked. `to_probe`: cross paths that a plan would use, of which nothing is known: the
    plan waits for their probes. `stays`: why what has changed has led to no plan; "" else.

    Raises:
        BadInput: there is no such mode, or the start is of other replicas.
    """

    def __init__(
        self,
        start: Schedule,
        estimator: ReplicaEstimator,
        rule: ReplanPolicy,
        mode: str = "auto",
        ops: int = OPS,
    ) -> None:
        if mode not in MODES:
            raise BadInput("reroute", mode, f"it has to be one of {', '.join(MODES)}")
        shape = (estimator.replicas, estimator.stages)
        if (start.replicas, start.stages) != shape:
            allowed = f"{shape[0]} replicas of {shape[1]} stages, as are measured"
            raise BadInput("start", f"{start.replicas} of {start.stages}", allowed)
        self.estimator, self.rule, self.mode = estimator, rule, mode
        self.predicted: float | None = None
        self.stays = ""
        self.to_probe: list[Path] = []
        self._ops = ops
        self._start, self._in_force = start, start
        self._iteration = 0
        self._asked = 0  # when the paths to probe were asked for
        self._again: int | None = None  # when those that have shown nothing are tried again
        self._paths: dict[Path, float] = {}  # not yet planned for, with their old seconds
        self._workers: dict[int, float] = {}  # the same, with their old factors
        self._seen: set[int] = set()  # workers that had changed an iteration ago
        self._not_before = 0  # to plan takes a while, in which training launches less
        self._planned: Mapping[int, float] = {}  # factors by the last plan
        self._over_budget = False
        self._tried: tuple[Schedule, tuple[int, ...], int] | None = None  # before; who; until when
        self._tries = Backoff(LONGEST_WITHOUT_TRY)  # a microbatch there makes an iteration longer
        self._trials: Trials[ReplicaChange] = Trials(start, rule)

    def observe(
        self,
        iteration: int,
        reports: Mapping[int, StageReport] | Sequence[StageReport],
        ran: Schedule | None,
    ) -> Changed:
        """Take the reports of an iteration.

        Args:
            iteration: its number.
            reports: by worker; some may be missing.
            ran: the schedule of the iteration before, whose seconds the reports have; None where
                that is not known any more.

        Returns:
            What has changed for good, to plan for.
        """
        self.predicted = None
        by_worker = reports if isinstance(reports, Mapping) else dict(enumerate(reports))
        usable = self.estimator.usable(by_worker)
        if not usable:
            return Changed([], [])
        each = [r.seconds for r in usable.values() if r.stage == 0 and r.seconds is not None]
        seconds = max((s for s in each if 0 < s < LONGEST), default=None)  # of the slowest replica
        changed = self.estimator.update(usable)
        self._trials.observe(iteration, list(usable.values()), seconds, changed.any)
        self._over_budget |= self.estimator.measure_budget(usable)
        if seconds is not None and self.estimator.known and iteration % LEARN == 0:
            self._learn(ran, seconds)
        return changed

    def _learn(self, ran: Schedule | None, seconds: float) -> None:
        if ran is not None:
            plain = self.estimator.conditions(corrected=False, native=ran.stock)
            self.predicted = self.simulated(ran, plain).predicted
            learn = self.estimator.learn_stock if ran.stock else self.estimator.learn
            learn(self.predicted, seconds)

    def propose(
        self, iteration: int, changed: Changed, in_force: Schedule, possible: bool
    ) -> ReplicaChange | None:
        """A plan that is clearly better than the one in force, if there is one.

        Args:
            iteration: the last one that was observed.
            changed: from `observe`.
            in_force: the schedule that all ranks run.
            possible: a proposal can be made now; else what has changed is remembered.
        """
        self.stays = ""
        if self.rule.fixed or not self.estimator.known:
            return None
        self._in_force, self._iteration = in_force, iteration
        before = iteration < self._trials.since  # of the plan before: what has changed shows again
        if before:
            changed = Changed([], [])
        self._remember(changed)
        if not possible:
            return None
        if self._over_budget and (change := self._for_memory()) is not None:
            return change
        if self._trials.slower is not None:
            return self._undo(*self._trials.slower)
        if before:
            return None
        due = bool(self._paths or self._workers)
        if self.to_probe:
            due = self._probed()
        elif self._again is not None and iteration >= self._again:
            self._again, due = None, True
            self.estimator.forget_lost()
        due &= changed.any or iteration >= self._not_before
        # What changes on a busy machine in each iteration does not keep a plan in force.
        if due and not self._postponed(changed.any) and (change := self._plan()) is not None:
            return change
        if self._tried is not None:
            return self._end_of_try()
        if iteration % LEARN == 0 and self.estimator.calibrated and not self.to_probe:
            return self._try_idle() or self._reconsider()
        return None

    def swapped(self, change: ReplicaChange, iteration: int) -> None:
        """`change` is in force from `iteration` on."""
        self._trials.swapped(change, iteration)
        self._paths, self._workers, self.to_probe = {}, {}, []
        tried, self._tried = self._tried, None
        if change.workers:  # who is slow is not as it was
            self._tries.passed()
        elif tried is not None:
            self._tries.failed(iteration)
        if change.tries:
            self._tried = change.current.schedule, change.tries, iteration + TRIED
        if (undone := change.undoes) is not None and undone.retry:
            self._restore(undone)  # once it is not blocked any more

    def failed(self, change: ReplicaChange) -> None:
        """It will not be: its reason still stands."""
        if change.retry:
            self._restore(change)

    def stock(self) -> Timeline:
        """What the start would do now."""
        native = self._start.stock
        return self.simulated(self._start, self.estimator.conditions(native=native)).timeline

    def simulated(self, schedule: Schedule, conditions: ReplicaConditions) -> ReplicaPlan:
        """What an iteration of a `schedule` takes under `conditions`, by the rule's messages."""
        if schedule.stock:
            return evaluate_replicas(schedule, conditions, "eager", 0)
        return evaluate_replicas(schedule, conditions, self.rule.sends, self.rule.ahead)

    def _restore(self, change: ReplicaChange) -> None:
        self._paths = {**change.paths, **self._paths}
        self._workers = {**change.workers, **self._workers}

    def _remember(self, changed: Changed) -> None:
        charts = self.estimator.charts if changed.paths else {}
        for path in changed.paths:
            self._paths.setdefault(path, charts[path].level or 0.0)
        for worker in set(changed.workers) & self._seen:  # once more than a link: see SlowWorkers
            self._workers.setdefault(worker, self._planned.get(worker, 1.0))
        self._seen = set(changed.workers)

    def _probed(self) -> bool:
        """Whether the paths of a plan that waits have shown what they take, or never will."""
        self.to_probe = [path for path in self.to_probe if not self.estimator.proven(path)]
        if self.to_probe and self._iteration >= self._asked + PATIENCE:
            self.estimator.lost(self.to_probe)
            self.to_probe, self._again = [], self._iteration + RETRY
        return not self.to_probe

    def _postponed(self, changed: bool) -> bool:
        """Whether what has changed, some of it just now (`changed`), is to wait."""
        postponed = self._trials.postpones(self._in_force, self._iteration, LEARN)
        if changed and self._trials.blocks_any(self._iteration):
            self._accept(self.estimator.conditions())
        return postponed

    def _accept(self, conditions: ReplicaConditions) -> None:
        self.estimator.accept()
        self._planned = dict(conditions.slow)

    def _plan(self) -> ReplicaChange | None:
        """Something has changed for good."""
        began = time.perf_counter()
        c = self.estimator.conditions()
        # Some may be as they were by now.
        now = {path: (old, c.message_seconds(*path)) for path, old in self._paths.items()}
        paths = {path: old for path, (old, new) in now.items() if _differ(old, new)}
        factors = {w: (old, c.slow.get(w, 1.0)) for w, old in self._workers.items()}
        workers = {w: old for w, (old, new) in factors.items() if _differ(old, new)}
        eased = any(new < old for old, new in (*now.values(), *factors.values()))
        self._accept(c)
        current, plan = self._evaluate(self._in_force, c), self._choose(c)
        back = plan.schedule is self._start
        worth = self.rule.worth(plan, current, eased)
        worth |= eased and back and self.rule.spares(plan, current)
        if not worth or plan.schedule.same_as(self._in_force):
            self._paths, self._workers = {}, {}
            if not eased and (paths or workers):
                self.stays = why_stays(paths, workers, c)
            return None
        if self._trials.blocks(plan.schedule, self._iteration):
            self._not_before = self._iteration + FIRST_BLOCK
            return None
        if unproven := self.estimator.unproven(plan.schedule):
            self.to_probe, self._asked = unproven, self._iteration
            return None
        self._paths, self._workers = {}, {}
        why = why_change(paths, workers, c, current, plan, back)
        seconds = time.perf_counter() - began
        return ReplicaChange(why, plan, current, c, seconds, paths, workers, retry=True)

    def _choose(self, conditions: ReplicaConditions) -> ReplicaPlan:
        """The cheapest of the fastest plans where that is clearly faster; else the start."""
        start = self._evaluate(self._start, conditions)
        if self._healthy(conditions):
            return start
        c, one = conditions, self._one()
        plans, mode = [], self.mode
        for schedule in chain_schedules(c, one, self.rule.evaluate, self.rule.make_plan):
            if mode != NO_ROUTES or not schedule.routes.moved:
                plans.append(self._evaluate(schedule, c))
        least = min(plan.predicted for plan in plans)
        well = self.rule.evaluate(one, c.pipeline.healthy()).predicted
        if mode == "auto" and least > well * (1 + NEAR):  # else there is nothing to search for
            moves = plan_replicas(c, self.rule.sends, ops=self._ops).moves
            plans += [self._evaluate(move.schedule, c) for move in moves]
            least = min(plan.predicted for plan in plans)
        best = next(plan for plan in plans if plan.predicted <= least * (1 + NEAR))
        return best if self.rule.gains(best, start) else start

    def _one(self) -> Schedule:
        """The start, of one pipeline, over our messages."""
        lines = self._start.order[: self._start.stages]
        order = tuple(tuple(op._replace(home=None) for op in line) for line in lines)
        return Schedule(order, self._start.microbatches, policy="1f1b")

    def _healthy(self, conditions: ReplicaConditions) -> bool:
        """Whether no worker is slow, nor any link of a pipeline."""
        c, stages = conditions, self.estimator.stages
        least = ABSOLUTE * self.estimator.stage_seconds()
        slow = any(times > 1 for times in c.slow.values())
        if slow or any(c.pipeline.message_seconds(*link) >= least for link in c.pipeline.links):
            return False
        return not any(
            a // stages == b // stages
            and c.message_seconds(a, b) >= c.pipeline.message_seconds(a % stages, b % stages)
            for a, b in c.paths
        )

    def _undo(self, change: ReplicaChange, outcome: Outcome) -> ReplicaChange:
        """The plan before was faster, by what iterations have taken, whatever was predicted."""
        c = self.estimator.conditions()
        plan, current = (
            replace(evaluated, extra=seconds - evaluated.timeline.makespan)
            for evaluated, seconds in (
                (self._evaluate(change.current.schedule, c), outcome.before),
                (self._evaluate(self._in_force, c), outcome.after),
            )
        )
        why = why_undone(current, plan, plan.schedule.same_as(self._start))
        return ReplicaChange(why, plan, current, c, trial=False, undoes=change)

    def _for_memory(self) -> ReplicaChange | None:
        """What workers may hold has become known in microbatches: keep to it."""
        budgets, stages = self.estimator.budgets, self.estimator.stages
        if not self._start.stock:  # Megatron's own is what it is
            least = [min(budgets[stage::stages]) for stage in range(stages)]
            one = first_schedule(stages, self._start.microbatches, least)
            self._start = self._trials.start = one.replicated(self.estimator.replicas)
        held = () if self._in_force.stock else self._in_force.peak_in_flight()
        over = [w for w, most in enumerate(held) if most > budgets[w]]
        c = self.estimator.conditions()
        lines = self._in_force.order
        halved = not c.pipeline.split and any(op.kind is Kind.W for line in lines for op in line)
        self._over_budget = bool(over) or halved  # until a plan that fits is in force
        if not self._over_budget:
            return None
        why = "there is no memory for backwards in halves"
        if over:
            first = over[0]
            has = f"holds {held[first]:g} microbatches, its memory is for {budgets[first]:.4g}"
            why = f"worker {worker_name(first, stages)} {has}"
        current, plan = self._evaluate(self._in_force, c), self._choose(c)
        if self.estimator.unproven(plan.schedule):
            plan = self._evaluate(self._start, c)
        return ReplicaChange(why, plan, current, c, trial=False)

    def _reconsider(self) -> ReplicaChange | None:
        """Whether the plan in force is still needed: it was made from a few hasty samples."""
        began = time.perf_counter()
        if self._in_force.same_as(self._start):
            return None
        if self._trials.blocks_leaving(self._in_force, self._iteration):
            return None
        c = self.estimator.conditions()
        current, start = self._evaluate(self._in_force, c), self._evaluate(self._start, c)
        if not self.rule.spares(start, current):
            return None
        why, seconds = why_spared(current, start), time.perf_counter() - began
        return ReplicaChange(why, start, current, c, seconds)

    def _try_idle(self) -> ReplicaChange | None:
        """Give slow workers that have run nothing for long a microbatch, some iterations long."""
        idle = [w for w in self.estimator.slow_workers.to_try() if not self._in_force.order[w]]
        if not idle or self._tries.blocks(self._iteration):
            return None
        c, schedule = self.estimator.conditions(), self._in_force
        for worker in idle:
            schedule = (
                one_back(schedule, worker, lambda s: self._evaluate(s, c).predicted) or schedule
            )
        if unproven := self.estimator.unproven(schedule):
            if self._again is None:
                self.to_probe, self._asked = unproven, self._iteration
            return None
        names = ", ".join(worker_name(worker, self.estimator.stages) for worker in idle)
        current, plan = self._evaluate(self._in_force, c), self._evaluate(schedule, c)
        why = why_tried(names, TRY_AGAIN)
        return ReplicaChange(why, plan, current, c, trial=False, tries=tuple(idle))

    def _end_of_try(self) -> ReplicaChange | None:
        """They have shown that they are as slow as they were."""
        assert self._tried is not None
        schedule, workers, until = self._tried
        if self._iteration < until:
            return None
        c = self.estimator.conditions()
        current, plan = self._evaluate(self._in_force, c), self._evaluate(schedule, c)
        return ReplicaChange(why_tried_enough(workers, c), plan, current, c, trial=False)

    def _evaluate(self, schedule: Schedule, conditions: ReplicaConditions) -> ReplicaPlan:
        """What an iteration takes under `conditions`; what Megatron runs has links of its own."""
        if not schedule.stock:
            return self.simulated(schedule, conditions)
        plan = self.simulated(schedule, self.estimator.conditions(native=True))
        return replace(plan, extra=self.estimator.stock_extra)


def _differ(old: float, new: float) -> bool:
    return abs(new - old) > RELATIVE / 2 * max(old, new)
