"""The common part of remedies by a schedule: of one pipeline, and of replicas with one plan."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic

from megatron_adaptra.adapt.leader import Leader
from megatron_adaptra.adapt.log import DecisionLog
from megatron_adaptra.adapt.loop import RECENT_ITERATIONS, Proposed, Remedy
from megatron_adaptra.adapt.schedules.change import Change, K, P
from megatron_adaptra.adapt.schedules.decisions import (
    WARMUP,
    LinkChange,
    LinkEnd,
    PlanDecision,
    Worker,
)
from megatron_adaptra.adapt.schedules.replanner import Replanner
from megatron_adaptra.agree.bundle import SCHEDULE, Bundle, scheduled
from megatron_adaptra.ir.routes import Path, worker_name
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.measure.op_seconds import WINDOW
from megatron_adaptra.measure.replica_estimate import Changed
from megatron_adaptra.measure.report import StageReport

KEPT_DELAYS = 512  # iterations


class PlanRemedy(Remedy[StageReport, PlanDecision], Generic[P, K]):
    """A plan remedy changes the schedule of a pipeline, or that of replicas planned together.

    Args:
        start: the schedule to come back to when nothing is slow.
        replanner: decides when to change it, and to what.
        log: of decisions, and the record of the run.
        workers: all that report, by number.

    `delays` has, by iteration, the seconds of each link; of a long training every second iteration,
    or every fourth, and so on.
    """

    explains = WARMUP

    def __init__(
        self,
        start: Schedule,
        replanner: Replanner[P, K],
        log: DecisionLog[PlanDecision],
        workers: Sequence[Worker],
    ) -> None:
        super().__init__(len(start.order), log)
        self.replanner = replanner
        self.delays: dict[int, dict[str, float]] = {}
        self._every = 1  # of so many iterations the delays of one are kept
        self._start = start
        self._workers = tuple(workers)
        self._through: dict[int, Mapping[int, str]] = {}  # by worker, as last reported
        self._change: Change[P, K]  # proposed last
        self._ran: dict[int, Schedule] = {}  # in recent iterations

    def begins(self, iteration: int, bundle: Bundle) -> None:
        self._ran[iteration] = bundle[SCHEDULE]
        self._ran.pop(iteration - RECENT_ITERATIONS, None)

    def close(self) -> None:
        self.log.settle()  # later runs have the same log

    def evaluate(self, schedule: Schedule, conditions: K) -> P:
        """Return what an iteration of a `schedule` takes under `conditions`, as plans compare."""
        return self.replanner.simulated(schedule, conditions)

    def state(self) -> dict[str, float]:
        """Return what is planned for, to go on from after a restart: seconds per link."""
        return self.replanner.estimator.state()

    @abstractmethod
    def _log_outcome(self, iteration: int, reports: Mapping[int, StageReport]) -> None:
        """Log what the iteration before has taken, by the `reports` of this one."""

    @abstractmethod
    def _estimate(
        self, iteration: int, reports: Mapping[int, StageReport], ran: Schedule | None
    ) -> Changed:
        """Show the replanner an iteration: see its `observe`."""

    def _prepare(self) -> Proposed[PlanDecision] | None:
        """Propose a change that a plan needs before it can be proposed itself, if there is one."""
        return None

    def sender(self, report: StageReport) -> int:
        return report.worker

    def observe(
        self, iteration: int, row: Mapping[int, StageReport]
    ) -> Proposed[PlanDecision] | None:
        for worker, report in row.items():
            self._through[worker] = {source: link.through for source, link in report.links.items()}
        self._log_outcome(iteration, row)
        if iteration == self.vote.first:
            return None  # allocators and caches warm up
        ran = self._ran.pop(iteration - 1, None)
        changed = self._estimate(iteration, row, ran)
        self._keep_delays(iteration)
        if ran is not None and self.replanner.predicted is not None:
            self._refresh_prediction(iteration, ran, self.replanner.predicted)
        in_force, possible = self.vote.in_force[SCHEDULE], self.vote.can_propose(iteration)
        change = self.replanner.propose(iteration, changed, in_force, possible)
        if self.replanner.stays:
            self.vote.note(self.replanner.stays)
        if change is not None:
            return self._proposed(iteration, change)
        return self._prepare() if possible else None

    def observed(self, iteration: int, row: Mapping[int, StageReport]) -> None:
        status = self._status(iteration)
        self.vote.publish(status)
        self.log.record.iteration(iteration, list(row.values()), status)

    def _proposed(self, iteration: int, change: Change[P, K]) -> Proposed[PlanDecision]:
        """Propose a `change` after the reports of `iteration`, with the reason for the log."""
        before, plan = self.vote.in_force[SCHEDULE], change.plan
        stock, self._change = self.replanner.stock(), change
        bundle = scheduled(plan.schedule)

        def decide(swap: int) -> PlanDecision:
            return PlanDecision(
                number=self.log.made,
                iteration=swap,
                detected=iteration,
                kinds=bundle.names,
                links=[self._link_change(link, old, change) for link, old in change.links.items()],
                why=change.why,
                warmup_before=list(before.warmup),
                warmup_after=list(plan.schedule.warmup),
                predicted_ms=1e3 * plan.predicted,
                predicted_without_ms=1e3 * change.current.predicted,
                stock=stock,
                lower_bound_ms=1e3 * plan.lower_bound,
                planning_ms=1e3 * change.seconds,
                digest=plan.schedule.digest(),
                plan=plan.schedule.text(),
                conditions=change.conditions.to_json(),
                again=change.again,
            )

        return Proposed(bundle, decide)

    def _link_change(self, link: Path, before: float, change: Change[P, K]) -> LinkChange:
        """Return what a `change` is for at one link, where a message took `before` seconds."""
        now, wire = change.conditions.link(*link), change.conditions.wire(*link)
        return LinkChange(
            self._end(*link),
            self._end(*link[::-1]),
            delay_before_ms=1e3 * before,
            delay_ms=1e3 * now.delay,
            wire_ms=1e3 * wire,
            bandwidth=now.bandwidth if wire else None,
        )

    def _end(self, worker: int, other: int) -> LinkEnd:
        """Return the end at a `worker` of the link to the `other` one."""
        stages, several = self._start.stages, self._start.replicas > 1
        through = self._through.get(worker, {}).get(other, "")
        name = worker_name(worker, stages) if several else ""
        return LinkEnd(worker % stages, *self._workers[worker], through, name)

    def _status(self, iteration: int) -> dict[str, Any]:
        """Return what charts of the training show.

        `delays` in seconds per link, `alarms` the links that are out of their charts, and of the
        last decision the predicted seconds of an iteration and their lower bound.
        """
        estimator = self.replanner.estimator
        status = {
            "iteration": iteration, "delays": estimator.delays() if self.delays else {},
            "alarms": estimator.alarms(), "replans": self.log.committed,
        }  # fmt: skip
        if (last := self.log.last) is not None:
            status["predicted"] = (last.refreshed_ms or last.predicted_ms) / 1e3
            status["lower_bound"] = last.lower_bound_ms / 1e3
        return status

    def _keep_delays(self, iteration: int) -> None:
        """Keep the delays of an `iteration`: rows span the training, KEPT_DELAYS at most."""
        if iteration % self._every == 0:
            self.delays[iteration] = self.replanner.estimator.delays()
        if len(self.delays) > KEPT_DELAYS:
            self._every *= 2
            self.delays = {i: row for i, row in self.delays.items() if i % self._every == 0}

    def _refresh_prediction(self, iteration: int, ran: Schedule, predicted: float) -> None:
        """Log `predicted` once the model knows only what was measured under the plan that `ran`."""
        last = self.log.last
        if last is None or last.refreshed_ms is not None or last.digest != ran.digest():
            return
        if iteration > last.iteration + WINDOW:
            last.refreshed_ms = 1e3 * predicted
            self.log.refresh(last, last.refreshed_ms)

    def switched(self, decision: PlanDecision, before: PlanDecision | None) -> None:
        self.replanner.swapped(self._change, decision.iteration)

    def refused(self) -> None:
        self.replanner.failed(self._change)  # the reason still stands: try again


def planner_of(controller: object) -> PlanRemedy[Any, Any] | None:
    """Return what plans for the ranks of a `controller`, at their leader; None at others."""
    remedy = controller.loop.remedy if isinstance(controller, Leader) else None
    return remedy if isinstance(remedy, PlanRemedy) else None
