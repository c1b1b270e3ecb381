"""The replanner of several replicas: when to change their plan, and to what.

It has no threads and sends no messages. It is the counterpart of adapt/pipeline/replanner.py for
replicas that share one leader. Remedies are the cheapest that suffice: deeper warmups where memory
allows, then other partners, then microbatches that run on another replica.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from megatron_adaptra.adapt.offer import Offer
from megatron_adaptra.adapt.routes.words import (
    BACK,
    why_change,
    why_spared,
    why_stays,
    why_tried,
    why_tried_enough,
)
from megatron_adaptra.adapt.schedules.change import Change, ReplicaChange
from megatron_adaptra.adapt.schedules.policy import ReplanPolicy
from megatron_adaptra.adapt.schedules.replanner import AGAIN, LEARN, Replanner
from megatron_adaptra.adapt.trial import FIRST_BLOCK, Backoff
from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.routes import Path, worker_name
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.measure.detect import ABSOLUTE, RELATIVE
from megatron_adaptra.measure.link_estimates import LONGEST
from megatron_adaptra.measure.replica_estimate import Changed, ReplicaEstimator
from megatron_adaptra.measure.report import StageReport
from megatron_adaptra.measure.slow_workers import TRY_AGAIN
from megatron_adaptra.plan.routes import route_server
from megatron_adaptra.plan.routes.one_back import one_back
from megatron_adaptra.plan.routes.reroute import ReplicaPlan, evaluate_replicas
from megatron_adaptra.plan.routes.swaps import alike, chain_schedules

Search = Callable[[ReplicaConditions, str, int], Sequence[Schedule]]  # see route_server.search

ALIKE, NO_ROUTES = "alike", "none"
MODES = (ALIKE, NO_ROUTES, "swap", "auto")
OPS = 200_000  # that a search for routes schedules at most: some 0.6 s
NEAR = 0.01  # share of an iteration for which a cheaper remedy is taken
PATIENCE = 20  # iterations that probes of a cross path may take to show what it takes
RETRY = 8 * FIRST_BLOCK  # iterations after which one that showed nothing is probed again
LONGEST_WITHOUT_TRY = 400  # iterations
TRIED = 8  # iterations for which an idle worker gets a microbatch


class RouteReplanner(Replanner[ReplicaPlan, ReplicaConditions]):
    """A replica replanner decides when several replicas change their plan, and to what.

    Args:
        start: of all replicas, each by itself; what to come back to when nobody is slow.
        estimator: of all workers.
        rule: by which plans are compared, and those of one pipeline are made.
        mode: "alike": all replicas have the same warmups; "none": only warmups change; "swap": also
            whom a worker exchanges messages with; "auto": microbatches may run on other replicas,
            too.
        ops: that a search for routes may schedule.
        search: by which routes are found; beside a training in a process of its own.

    `to_probe`: cross paths that a plan would use, of which nothing is known: the plan waits for
    their probes. `offer`: what it would do about what has changed last; None until something has.

    Raises:
        BadInput: there is no such mode, or the start is of other replicas.
    """

    estimator: ReplicaEstimator

    def __init__(
        self,
        start: Schedule,
        estimator: ReplicaEstimator,
        rule: ReplanPolicy,
        mode: str = "auto",
        ops: int = OPS,
        search: Search = route_server.search,
    ) -> None:
        if mode not in MODES:
            raise BadInput("reroute", mode, f"it has to be one of {', '.join(MODES)}")
        shape = (estimator.replicas, estimator.stages)
        if (start.replicas, start.stages) != shape:
            allowed = f"{shape[0]} replicas of {shape[1]} stages, as are measured"
            raise BadInput("start", f"{start.replicas} of {start.stages}", allowed)
        super().__init__(start, estimator, rule)
        self.mode = mode
        self.to_probe: list[Path] = []
        self.offer: Offer | None = None
        self._ops, self._search = ops, search
        self._asked = 0  # when the paths to probe were asked for
        self._again: int | None = None  # when those that have shown nothing are tried again
        self._seen: set[int] = set()  # workers that had changed an iteration ago
        self._not_before = 0  # to plan takes a while, in which training launches less
        # When no plan gained enough from what had changed: see PipelineReplanner.
        self._declined: tuple[int, dict[Path, float], dict[int, float]] | None = None
        self._planned: Mapping[int, float] = {}  # factors by the last plan
        self._tried: tuple[Schedule, tuple[int, ...], int] | None = None  # before; who; until when
        self._tries = Backoff(LONGEST_WITHOUT_TRY)  # a microbatch there makes an iteration longer

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
        self._take_meetings(by_worker.values())
        usable = self.estimator.usable(by_worker)
        if not usable:
            return Changed([], [])
        each = self.estimator.iteration_seconds(usable)
        seconds = max((s for s in each if 0 < s < LONGEST), default=None)  # of the slowest replica
        changed = self.estimator.update(usable)
        self._trials.observe(iteration, list(usable.values()), seconds, changed.any)
        self._over_budget |= self.estimator.measure_budget(usable)
        often = self.estimator.known and iteration % LEARN == 0
        if ran is not None and seconds is not None and often:
            self._learn(ran, seconds)
        return changed

    def propose(
        self, iteration: int, changed: Changed, in_force: Schedule, possible: bool
    ) -> ReplicaChange | None:
        """Return None until each worker has reported; `iteration`, `possible`: see the base."""
        if self.estimator.known:
            return super().propose(iteration, changed, in_force, possible)
        self.stays = ""
        return None

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
        """Simulate the start."""
        native = self._start.stock
        return self.simulated(self._start, self.estimator.conditions(native=native)).timeline

    def simulated(self, schedule: Schedule, conditions: ReplicaConditions) -> ReplicaPlan:
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
        paths = {path: old for path, (old, new) in now.items() if _differ(old, new)}
        factors = {w: (old, c.slow.get(w, 1.0)) for w, old in self._workers.items()}
        workers = {w: old for w, (old, new) in factors.items() if _differ(old, new)}
        eased = any(new < old for old, new in (*now.values(), *factors.values()))
        self._accept()
        current, plan = self._evaluate(self._in_force, c), self._choose(c)
        back = plan.schedule is self._start
        worth = self.rule.worth(plan, current, eased)
        worth |= eased and back and self.rule.spares(plan, current)
        leaves = 1.0
        if worth and current.predicted:
            leaves = plan.predicted / current.predicted
        self.offer = Offer(0 if self.offer is None else self.offer.number + 1, leaves)
        if not worth or plan.schedule.same_as(self._in_force):
            self._forget()
            if not eased and (paths or workers):
                self.stays = why_stays(paths, workers, c)
                self._declined = self._iteration, paths, workers
            return None
        if self._trials.blocks(plan.schedule, self._iteration):
            self._not_before = self._trials.until(plan.schedule)
            return None
        if unproven := self.estimator.unproven(plan.schedule):
            self.to_probe, self._asked = unproven, self._iteration
            return None
        self._forget()
        why = why_change(paths, workers, c, current, plan, back)
        seconds = time.perf_counter() - began
        return Change(why, plan, current, c, seconds, paths, workers, retry=True)

    def _choose(self, conditions: ReplicaConditions) -> ReplicaPlan:
        """Return the cheapest of the fastest plans if it is clearly faster; else the start."""
        start = self._evaluate(self._start, conditions)
        if self._healthy(conditions):
            return start
        c, one = conditions, self._one()
        plans, mode = [], self.mode
        if mode == ALIKE:
            best = self._evaluate(alike(c, self.rule.make_plan), c)
            return best if self.rule.gains(best, start) else start
        for schedule in chain_schedules(c, one, self.rule.evaluate, self.rule.make_plan):
            if mode != NO_ROUTES or not schedule.routes.moved:
                plans.append(self._evaluate(schedule, c))
        least = min(plan.predicted for plan in plans)
        well = self.rule.evaluate(one, c.pipeline.healthy()).predicted
        if mode == "auto" and least > well * (1 + NEAR):  # else there is nothing to search for
            found = self._search(c, self.rule.sends, self._ops)
            plans += [self._evaluate(schedule, c) for schedule in found]
            least = min(plan.predicted for plan in plans)
        best = next(plan for plan in plans if plan.predicted <= least * (1 + NEAR))
        return best if self.rule.gains(best, start) else start

    def _one(self) -> Schedule:
        """Return the start of one pipeline, with our messages instead of Megatron's."""
        return replace(self._start.one_pipeline(), policy="1f1b", why="")

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
        return why_spared(current, start)

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
        return Change(why, plan, current, c, trial=False, tries=tuple(idle))

    def _end_of_try(self) -> ReplicaChange | None:
        """Go back to the plan before a try when that is over, as its workers are still slow."""
        assert self._tried is not None
        schedule, workers, until = self._tried
        if self._iteration < until:
            return None
        c = self.estimator.conditions()
        current, plan = self._evaluate(self._in_force, c), self._evaluate(schedule, c)
        return Change(why_tried_enough(workers, c), plan, current, c, trial=False)


def _differ(old: float, new: float) -> bool:
    return abs(new - old) > RELATIVE / 2 * max(old, new)
