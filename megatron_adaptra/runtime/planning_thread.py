"""What plans beside a training: a thread that gets reports and votes, and proposes bundles.

`replan_loop` is the one of a pipeline, `replica_loop` that of several replicas.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic

from megatron_adaptra.ir.routes import Path, worker_name
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.log import log_line
from megatron_adaptra.runtime.agreement import Proposal
from megatron_adaptra.runtime.base_replanner import BaseReplanner
from megatron_adaptra.runtime.bundle import SCHEDULE, Bundle, scheduled
from megatron_adaptra.runtime.change import Change, K, P
from megatron_adaptra.runtime.decisions import (
    WARMUP,
    Decision,
    DecisionLog,
    LinkChange,
    LinkEnd,
    Worker,
    sentence,
)
from megatron_adaptra.runtime.voted_thread import VotedThread
from megatron_adaptra.telemetry.op_seconds import WINDOW
from megatron_adaptra.telemetry.replica_estimate import Changed
from megatron_adaptra.telemetry.report import StageReport

RECENT = 256  # iterations of which it is kept what ran, and what some workers have reported
KEPT = 512  # iterations whose delays are kept


class PlanningThread(VotedThread[StageReport], Generic[P, K]):
    """Has what it plans put to the vote, so that training goes on meanwhile.

    Args:
        start: the schedule to come back to when nothing is slow.
        replanner: only this thread calls it once `start` is called.
        log: of decisions, and the record of the run.
        workers: all that report, by number.
        announce: decisions go to the log of the training, too.

    `delays` has, by iteration, the seconds of each link; of a long training every second iteration,
    or every fourth, and so on. No error leaves the thread: it costs a replan, and is logged once.
    """

    def __init__(
        self,
        start: Schedule,
        replanner: BaseReplanner[P, K],
        log: DecisionLog,
        workers: Sequence[Worker],
        *,
        announce: bool = False,
    ) -> None:
        super().__init__()
        self.replanner, self.log = replanner, log
        self.delays: dict[int, dict[str, float]] = {}
        self._every = 1  # of so many iterations the delays of one are kept
        self._start, self._announce = start, announce
        self._workers = tuple(workers)
        self._through: dict[int, Mapping[int, str]] = {}  # by worker, as last reported
        self._pending: tuple[Proposal, Decision, Change[P, K]] | None = None
        self._reports: dict[int, dict[int, StageReport]] = {}  # by iteration and worker
        self._ran: dict[int, Schedule] = {}  # in recent iterations

    # Called by any thread.

    def begins(self, iteration: int, bundle: Bundle) -> None:
        """All ranks run `bundle` in `iteration`."""
        self._ran[iteration] = bundle[SCHEDULE]
        self._ran.pop(iteration - RECENT, None)

    def close(self) -> None:
        """As for VotedThread; log the last outcome."""
        super().close()
        self.log.settle()

    def evaluate(self, schedule: Schedule, conditions: K) -> P:
        """What an iteration of a `schedule` takes under `conditions`, as plans are compared."""
        return self.replanner.simulated(schedule, conditions)

    @abstractmethod
    def state(self) -> dict[str, float]:
        """What is planned for, to go on from after a restart: seconds per link."""

    # On the planning thread.

    @abstractmethod
    def _log_outcome(self, iteration: int, reports: Mapping[int, StageReport]) -> None:
        """Log what the iteration before has taken, by the `reports` of this one."""

    @abstractmethod
    def _observe(
        self, iteration: int, reports: Mapping[int, StageReport], ran: Schedule | None
    ) -> Changed:
        """Show the replanner an iteration: see its `observe`."""

    def _ask(self, iteration: int) -> None:
        """No plan is proposed in this `iteration`: propose what one needs first, if it does."""

    def _take(self, report: StageReport) -> None:
        workers, iteration = len(self._start.order), report.iteration
        recent = range(self._vote.iteration - RECENT, self._vote.iteration + RECENT)
        if report.stage not in range(workers) or iteration not in recent:
            return  # late, or nonsense
        for late in [i for i in self._reports if i not in recent]:
            del self._reports[late]  # a worker does not report any more, or not all
        row = self._reports.setdefault(iteration, {})
        row[report.stage] = report
        if len(row) == workers:
            del self._reports[iteration]
            reports = {w: row[w] for w in range(workers)}
            self._through = {w: report.through for w, report in reports.items()}
            self._on_reports(iteration, reports)
            status = self._status(iteration)
            self._vote.publish(status)
            self._keep(iteration, reports, status)

    def _on_reports(self, iteration: int, reports: Mapping[int, StageReport]) -> None:
        """All workers have reported an iteration: plan again if there is a reason."""
        self._log_outcome(iteration, reports)
        if iteration == self._vote.first:
            return  # allocators and caches warm up
        ran = self._ran.pop(iteration - 1, None)
        changed = self._observe(iteration, reports, ran)
        self._keep_delays(iteration)
        if ran is not None and self.replanner.predicted is not None:
            self._refresh_prediction(iteration, ran, self.replanner.predicted)
        in_force, possible = self._vote.in_force[SCHEDULE], self._vote.can_propose(iteration)
        change = self.replanner.propose(iteration, changed, in_force, possible)
        if self.replanner.stays:
            self._vote.note(self.replanner.stays)
        if change is not None:
            self._propose(iteration, change)
        elif possible:
            self._ask(iteration)

    def _propose(self, iteration: int, change: Change[P, K]) -> None:
        """Put a change to the vote, and log why."""
        before, plan = self._vote.in_force[SCHEDULE], change.plan
        stock = self.replanner.stock()
        proposal = self._vote.propose(iteration, scheduled(plan.schedule))
        if proposal is None:
            self.replanner.failed(change)
            return
        decision = Decision(
            number=self.log.made,
            iteration=proposal.swap,
            detected=iteration,
            kinds=proposal.bundle.names,
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
        self._pending = proposal, decision, change
        self.log.add(decision)

    def _link_change(self, link: Path, before: float, change: Change[P, K]) -> LinkChange:
        """What a `change` is for at one link, where a message took `before` seconds."""
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
        """That of a `worker` to the `other` one."""
        stages, several = self._start.stages, self._start.replicas > 1
        through = self._through.get(worker, {}).get(other, "")
        name = worker_name(worker, stages) if several else ""
        return LinkEnd(worker % stages, *self._workers[worker], through, name)

    def _keep(
        self, iteration: int, reports: Mapping[int, StageReport], status: dict[str, Any]
    ) -> None:
        """Write an iteration into the record of the run."""
        self.log.record.iteration(iteration, list(reports.values()), status)

    def _status(self, iteration: int) -> dict[str, Any]:
        """What charts of the training show.

        `delays` in seconds per link, `alarms` the links that are out of their charts, and of the
        last decision the predicted seconds of an iteration and their lower bound.
        """
        estimator = self.replanner.estimator
        status = {
            "iteration": iteration, "delays": estimator.delays() if self.delays else {},
            "alarms": estimator.alarms(), "replans": self.log.in_force,
        }  # fmt: skip
        if (last := self.log.last) is not None:
            status["predicted"] = (last.refreshed_ms or last.predicted_ms) / 1e3
            status["lower_bound"] = last.lower_bound_ms / 1e3
        return status

    def _keep_delays(self, iteration: int) -> None:
        """However long the training is, `delays` spans it and has so many rows at most."""
        if iteration % self._every == 0:
            self.delays[iteration] = self.replanner.estimator.delays()
        if len(self.delays) > KEPT:
            self._every *= 2
            self.delays = {i: row for i, row in self.delays.items() if i % self._every == 0}

    def _refresh_prediction(self, iteration: int, ran: Schedule, predicted: float) -> None:
        """Once the model is fed with what was measured under the plan in force alone."""
        last = self.log.last
        if last is None or last.refreshed_ms is not None or last.digest != ran.digest():
            return
        if iteration > last.iteration + WINDOW:
            self.log.refresh(last, 1e3 * predicted)

    def _close(self, proposal: Proposal) -> None:
        """A proposal is over."""
        self._vote.settle(proposal)
        closing, self._pending = self._pending, None
        if closing is None or closing[0] is not proposal:
            return
        _, decision, change = closing
        if proposal.committed:
            self.replanner.swapped(change, proposal.swap)
            self.log.commit(decision)
            if self._announce:
                log_line(sentence(decision))
                self._vote.note(WARMUP)
        else:  # the reason still stands: try again
            self.log.refuse(decision)
            self.replanner.failed(change)
