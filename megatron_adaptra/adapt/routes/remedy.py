"""The remedy of replicas that have one plan: who runs a microbatch at a stage.

Ways are the cheapest that suffice: deeper warmups where memory allows, then other partners, then
microbatches that run on another replica.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_adaptra.adapt.log import DecisionLog
from megatron_adaptra.adapt.loop import Offer, Proposed
from megatron_adaptra.adapt.planning_process import PlanningProcess
from megatron_adaptra.adapt.schedules.decisions import PlanDecision
from megatron_adaptra.adapt.schedules.policy import (
    Change,
    ReplanPolicy,
    frees,
    has_recovered,
    no_gain,
    was,
)
from megatron_adaptra.adapt.schedules.remedy import AGAIN, LEARN, PlanRemedy
from megatron_adaptra.adapt.trial import FIRST_BLOCK, Backoff
from megatron_adaptra.agree.bundle import LINKS, Bundle, Links
from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.base.units import brief
from megatron_adaptra.diagnose.finding import Worker
from megatron_adaptra.diagnose.pipeline import PipelineDiagnosis
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.routes import Path, worker_name
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.measure.detect import ABSOLUTE, apart, differ
from megatron_adaptra.measure.replica_estimate import Changed, ReplicaEstimator
from megatron_adaptra.measure.report import StageReport
from megatron_adaptra.measure.slow_workers import TRY_AGAIN, worker_in_words
from megatron_adaptra.plan.link_words import first_of, link_in_words
from megatron_adaptra.plan.routes.reroute import ReplicaPlan, evaluate_replicas
from megatron_adaptra.plan.routes.shares import one_back
from megatron_adaptra.plan.routes.swaps import alike, chain_schedules

ReplicaChange = Change[ReplicaPlan, ReplicaConditions]
ALIKE, NO_ROUTES = "alike", "none"
MODES = (ALIKE, NO_ROUTES, "swap", "auto")
BACK = "back to 1F1B, every microbatch at home"
OPS = 200_000  # that a search for routes schedules at most: some 0.6 s
NEAR = 0.01  # share of an iteration for which a cheaper remedy is taken
PATIENCE = 20  # iterations that probes of a cross path may take to show what it takes
RETRY = 8 * FIRST_BLOCK  # iterations after which one that showed nothing is probed again
LONGEST_WITHOUT_TRY = 400  # iterations
TRIED = 8  # iterations for which an idle worker gets a microbatch


class RouteProcess(PlanningProcess):
    """A route process searches for routes between replicas; see PlanningProcess."""

    def __call__(self, conditions: ReplicaConditions, sends: str, ops: int) -> list[Schedule]:
        """Search as `plan.server.search` does. Raises PlanningFailed."""
        request = {"conditions": conditions.to_json(), "sends": sends, "ops": ops}
        return self.ask(
            request, lambda answer: [Schedule.parse(text) for text in answer["schedules"]]
        )


class RouteRemedy(PlanRemedy[ReplicaPlan, ReplicaConditions]):
    """A route remedy plans the schedule of all replicas, with routes between them.

    Args:
        start: of all replicas, each by itself; what to come back to when nobody is slow.
        estimator: of all workers.
        rule: by which plans are compared, and those of one pipeline are made.
        log, workers, diagnosis: see PlanRemedy.
        mode: "alike": all replicas have the same warmups; "none": only warmups change; "swap": also
            whom a worker exchanges messages with; "auto": microbatches may run on other replicas,
            too.

    `to_probe`: cross paths that a plan would use, of which nothing is known: the plan waits for
    their probes.

    Raises:
        BadInput: there is no such mode, or the start is of other replicas.
    """

    estimator: ReplicaEstimator

    def __init__(
        self,
        start: Schedule,
        estimator: ReplicaEstimator,
        rule: ReplanPolicy,
        log: DecisionLog[PlanDecision],
        workers: Sequence[Worker],
        mode: str = "auto",
        diagnosis: PipelineDiagnosis | None = None,
    ) -> None:
        if mode not in MODES:
            raise BadInput("reroute", mode, f"it has to be one of {', '.join(MODES)}")
        shape = (estimator.replicas, estimator.stages)
        if (start.replicas, start.stages) != shape:
            allowed = f"{shape[0]} replicas of {shape[1]} stages, as are measured"
            raise BadInput("start", f"{start.replicas} of {start.stages}", allowed)
        super().__init__(start, estimator, rule, log, workers, diagnosis)
        self.mode = mode
        self.to_probe: list[Path] = []
        self._search = RouteProcess()
        self._asked = 0  # when the paths to probe were asked for
        self._again: int | None = None  # when those that have shown nothing are tried again
        self._seen: set[int] = set()  # workers that had changed an iteration ago
        self._not_before = 0  # to plan takes a while, in which training launches less
        # When no plan gained enough from what had changed: see PipelineRemedy.
        self._declined: tuple[int, dict[Path, float], dict[int, float]] | None = None
        self._planned: Mapping[int, float] = {}  # factors by the last plan
        self._tried: tuple[Schedule, tuple[int, ...], int] | None = None  # before; who; until when
        self._least = 0.0  # seconds of an iteration by the fastest plan that was made last
        self._tries = Backoff(LONGEST_WITHOUT_TRY)  # a microbatch there makes an iteration longer

    def close(self) -> None:
        super().close()
        self._search.close()

    def _settings(self) -> dict[str, Any]:
        estimators, replicas = self.estimator.settings(), self._start.replicas
        return {"replicas": replicas, "estimators": estimators, "mode": self.mode}

    def _prepare(self) -> Proposed[PlanDecision] | None:
        """Have links opened whose probes show what the paths of a plan take."""
        paths = self.to_probe
        there = self.vote.in_force[LINKS].pairs if paths else frozenset()
        missing = {(min(path), max(path)) for path in paths} - there
        return Proposed(Bundle({LINKS: Links(there | missing)})) if missing else None

    def _usable(self, rows: Mapping[int, StageReport]) -> Mapping[int, StageReport]:
        return self.estimator.usable(rows)

    def _update(self, rows: Mapping[int, StageReport]) -> Changed:
        changed = self.estimator.update(rows)
        self._over_budget |= self.estimator.measure_budget(rows)
        return changed

    def _replan(self, changed: bool) -> ReplicaChange | None:
        due = bool(self._paths or self._workers)
        if self.to_probe:
            due = self._probed()
        elif self._again is not None and self._iteration >= self._again:
            self._again, due = None, True
            self.estimator.forget_lost()
        due &= changed or self._iteration >= self._not_before
        # What changes on a busy machine in each iteration does not keep a plan in force.
        if due and not self._postponed(changed) and (change := self._plan()) is not None:
            return change
        if self._tried is not None:
            return self._end_of_try()
        if self._iteration % LEARN == 0 and self.estimator.calibrated and not self.to_probe:
            return self._try_idle() or self._reconsider() or self._look_again()
        return None

    def swapped(self, change: ReplicaChange, iteration: int) -> None:
        super().swapped(change, iteration)
        self.to_probe = []
        tried, self._tried = self._tried, None
        if change.workers:  # who is slow is not as it was
            self._tries.forget()
        elif tried is not None:
            self._tries.failed(iteration)
        if change.tries:
            self._tried = change.current.schedule, change.tries, iteration + TRIED

    def _forget(self) -> None:
        super()._forget()
        self._declined = None

    def _look_again(self) -> ReplicaChange | None:
        """Propose a plan for a change that was declined, if it gains enough by what is known."""
        if self._declined is None or self._trials.blocks_any(self._iteration):
            return None
        since, self._paths, self._workers = self._declined
        self._declined = None
        if self._iteration > since + AGAIN:
            self._paths, self._workers = {}, {}
            return None
        change, self.stays = self._plan(), ""  # why nothing changes is known
        if self._declined is not None:
            self._declined = since, *self._declined[1:]
        return change

    def stock(self) -> Timeline:
        """Simulate the start as unchanged Megatron runs it; see PipelineRemedy.stock."""
        measured = self._in_force.stock or self.estimator.stock_measured
        sends = self.rule.sends_of_stock(measured)
        # An emulated link, over which stock's messages are eager, delays no collective of the step.
        native = self._start.stock or sends == "rendezvous"
        conditions = self.estimator.conditions(native=native)
        return evaluate_replicas(self._start, conditions, sends, 0).timeline

    def evaluate(self, schedule: Schedule, conditions: ReplicaConditions) -> ReplicaPlan:
        if schedule.stock:
            return evaluate_replicas(schedule, conditions, "eager", 0)
        return evaluate_replicas(schedule, conditions, self.rule.sends, self.rule.ahead)

    def _remember(self, changed: Changed) -> None:
        super()._remember(changed)
        for worker in set(changed.workers) & self._seen:  # once more than a link: see SlowWorkers
            self._workers.setdefault(worker, self._planned.get(worker, 1.0))
        self._seen = set(changed.workers)

    def _probed(self) -> bool:
        """Return whether a waiting plan may go on: its paths are probed, or PATIENCE is over."""
        self.to_probe = [path for path in self.to_probe if not self.estimator.proven(path)]
        if self.to_probe and self._iteration >= self._asked + PATIENCE:
            self.estimator.lost(self.to_probe)
            self.to_probe, self._again = [], self._iteration + RETRY
        return not self.to_probe

    def _accept(self) -> None:
        self._planned = self.estimator.slow()
        super()._accept()

    def _plan(self) -> ReplicaChange | None:
        """Plan for what has changed for good; None where no swap is worth it, or possible now."""
        began = time.perf_counter()
        c = self.estimator.conditions()
        # Some may be as they were by now.
        now = {path: (old, c.message_seconds(*path)) for path, old in self._paths.items()}
        paths = {path: old for path, (old, new) in now.items() if differ(old, new)}
        factors = {w: (old, c.slow.get(w, 1.0)) for w, old in self._workers.items()}
        workers = {w: old for w, (old, new) in factors.items() if differ(old, new)}
        eased = any(new < old for old, new in (*now.values(), *factors.values()))
        self._accept()
        current, plan = self._evaluate(self._in_force, c), self._choose(c)
        back = plan.schedule is self._start
        well = back and all(has_recovered(old, c.message_seconds(*x)) for x, old in paths.items())
        well &= not any(apart(c.slow.get(worker, 1.0), 1.0) for worker in workers)
        well &= bool(paths or workers)
        what = _changes(paths, workers, c, well)
        worth = self.rule.worth(plan, current, eased)
        worth |= eased and back and self.rule.spares(plan, current)
        leaves = 1.0
        if worth and current.predicted:
            leaves = plan.predicted / current.predicted
        self.offer = Offer(0 if self.offer is None else self.offer.number + 1, leaves)
        if not worth or plan.schedule.same_as(self._in_force):
            self._forget()
            if not eased and (paths or workers):
                self.stays = (
                    f"{what}: {no_gain(current.predicted, self._least, self.rule.min_gain)}"
                )
                self.about = f"no plan for {sorted(paths)} {sorted(workers)}"
                self._declined = self._iteration, paths, workers
            return None
        if (backoff := self._trials.backoff(plan.schedule)).blocks(self._iteration):
            self._not_before = backoff.until
            return None
        if unproven := self.estimator.unproven(plan.schedule):
            self.to_probe, self._asked = unproven, self._iteration
            return None
        self._forget()
        runs = BACK if back else _what_runs(current, plan)
        why = f"{what}: {runs}{frees(current, plan) if well else ''}"
        seconds = time.perf_counter() - began
        return Change(why, plan, current, c, seconds, paths, workers, retry=True, recovered=well)

    def _choose(self, conditions: ReplicaConditions) -> ReplicaPlan:
        """Return the cheapest of the fastest plans if it is clearly faster; else the start."""
        start = self._evaluate(self._start, conditions)
        self._least = start.predicted
        if self._healthy(conditions):
            return start
        # That of one pipeline, with our messages instead of Megatron's.
        one = replace(self._start.one_pipeline(), policy="1f1b", why="")
        c, plans, mode = conditions, [], self.mode
        if mode == ALIKE:
            best = self._evaluate(alike(c, self.rule.make_plan), c)
            self._least = best.predicted
            return best if self.rule.gains(best, start) else start
        for schedule in chain_schedules(c, one, self.rule.evaluate, self.rule.make_plan):
            if mode != NO_ROUTES or not schedule.routes.moved:
                plans.append(self._evaluate(schedule, c))
        least = min(plan.predicted for plan in plans)
        well = self.rule.evaluate(one, c.pipeline.healthy()).predicted
        if mode == "auto" and least > well * (1 + NEAR):  # else there is nothing to search for
            found = self._search(c, self.rule.sends, OPS)
            plans += [self._evaluate(schedule, c) for schedule in found]
            least = min(plan.predicted for plan in plans)
        self._least = least
        best = next(plan for plan in plans if plan.predicted <= least * (1 + NEAR))
        return best if self.rule.gains(best, start) else start

    def _healthy(self, conditions: ReplicaConditions) -> bool:
        """Return whether all workers and all links within pipelines are fast."""
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

    def _choose_at_once(self, conditions: ReplicaConditions) -> ReplicaPlan:
        plan = self._choose(conditions)
        unproven = self.estimator.unproven(plan.schedule)
        return self._evaluate(self._start, conditions) if unproven else plan

    def _way_back(self, current: ReplicaPlan, plan: ReplicaPlan, to_start: bool) -> str:
        return BACK if to_start else "back to that plan"

    def _why_spared(self, current: ReplicaPlan, start: ReplicaPlan) -> str:
        return (
            f"{_what_runs(start, current)}: that gains too little now, an iteration takes "
            f"{1e3 * current.predicted:.4g} ms, and {1e3 * start.predicted:.4g} without it: {BACK}"
        )

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
        why = (
            f"worker {names} has run nothing for {TRY_AGAIN} iterations: it gets one microbatch, "
            "which shows what it takes now"
        )
        return Change(why, plan, current, c, trial=False, tries=tuple(idle))

    def _end_of_try(self) -> ReplicaChange | None:
        """Go back to the plan before a try when that is over, as its workers are still slow."""
        assert self._tried is not None
        schedule, workers, until = self._tried
        if self._iteration < until:
            return None
        c = self.estimator.conditions()
        current, plan = self._evaluate(self._in_force, c), self._evaluate(schedule, c)
        why = f"{', '.join(_slow(workers, c))}: the plan before comes back"
        return Change(why, plan, current, c, trial=False)


def _slow(workers: Iterable[int], c: ReplicaConditions) -> list[str]:
    return [worker_in_words(worker, c.slow.get(worker, 1.0), c.stages) for worker in workers]


def _changes(
    paths: Mapping[Path, float], workers: Iterable[int], c: ReplicaConditions, recovered: bool
) -> str:
    """Describe what has changed under conditions `c`, for people; `paths`: with seconds before.

    `recovered`: none of these is slow any more.
    """
    each = {
        f"path {c.name(a)}>{c.name(b)}": f"{link_in_words(c, (a, b))}, {was(old)}"
        for (a, b), old in paths.items()
    }
    if recovered:
        found = [f"worker {worker_name(worker, c.stages)} has recovered" for worker in workers]
        found += [f"{path} has recovered ({took})" for path, took in each.items()]
    else:
        found = _slow(workers, c) + [f"{path} takes {took}" for path, took in each.items()]
    return ", ".join(first_of(found)) or "measured again"


def _what_runs(current: ReplicaPlan, plan: ReplicaPlan) -> str:
    """Describe the routes of `plan`; without any, the warmups in it and in the `current` one."""
    if plan.schedule.routes.moved:
        return plan.schedule.why
    old, new = (brief(one.schedule.warmup) for one in (current, plan))
    return f"every microbatch at home (warmup {old} -> {new})"
