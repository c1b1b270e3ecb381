"""The replan loop: from the reports of all stages to a proposal, and to what came of it.

It plans in a thread of its own, so that training goes on meanwhile.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from megatron_adaptra import waits
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.log import log_line
from megatron_adaptra.runtime.agreement import Proposal
from megatron_adaptra.runtime.bundle import SCHEDULE, Bundle, scheduled
from megatron_adaptra.runtime.controller import MOST_JOBS
from megatron_adaptra.runtime.decisions import (
    WARMUP,
    Decision,
    DecisionLog,
    LinkChange,
    LinkEnd,
    Worker,
    sentence,
)
from megatron_adaptra.runtime.replan_policy import ReplanPolicy
from megatron_adaptra.runtime.replanner import Change, Link, Replanner
from megatron_adaptra.telemetry.estimate import Estimator
from megatron_adaptra.telemetry.op_seconds import WINDOW
from megatron_adaptra.telemetry.report import StageReport
from megatron_adaptra.telemetry.starvation import Starvation

RECENT = 256  # iterations of which it is kept what ran, and what some stages have reported
KEPT = 512  # iterations whose delays are kept


class Vote(Protocol):
    """By which all ranks agree on what is proposed: a Leader.

    The planning thread calls it. A method waits for torch's store at most,
    twice `waits.STORE` seconds.
    """

    first: int  # the first iteration of this run

    @property
    def in_force(self) -> Bundle:
        """What all ranks run now."""
        ...

    @property
    def iteration(self) -> int:
        """The last one that has begun."""
        ...

    def can_propose(self, iteration: int) -> bool:
        """Whether a proposal made after the reports of `iteration` may come into force."""
        ...

    def propose(self, iteration: int, bundle: Bundle) -> Proposal | None:
        """Propose to all ranks a bundle to swap to, some iterations from now.

        Args:
            iteration: whose reports have led to it.
            bundle: read by each rank before it answers; it comes into force whole, or not at all.

        Returns:
            The open proposal; None if nothing can be proposed now. `ReplanLoop.closed` gets it when
            training has reached its swap, with `committed` set.
        """
        ...

    def settle(self, proposal: Proposal) -> None:
        """A proposal is over: the next one may be made."""
        ...

    def publish(self, status: dict[str, Any]) -> None:
        """Show `status` in the charts of the training from now on."""
        ...

    def failed(self, what: str, error: Exception) -> None:
        """Log, once, that `what` has failed."""
        ...

    def note(self, text: str) -> None:
        """Log `text`, once."""
        ...


class ReplanLoop:
    """Estimates, plans, and has what it plans put to the vote, on a thread of its own.

    Args:
        start: the schedule to come back to when no link is slow.
        estimator: of this pipeline; only the planning thread changes it once `start` is called.
        rule: by which plans are made and compared.
        log: of decisions, and the record of the run.
        workers: of this pipeline, by stage.
        announce: decisions go to the log of the training, too.

    `delays` has, by iteration, the seconds of each link; of a long training every second iteration,
    or every fourth, and so on. No error leaves the thread: it costs a replan, and is logged once.
    """

    def __init__(
        self,
        start: Schedule,
        estimator: Estimator,
        rule: ReplanPolicy,
        log: DecisionLog,
        workers: Sequence[Worker],
        *,
        announce: bool = False,
    ) -> None:
        self.replanner = Replanner(start, estimator, rule)
        self.estimator, self.rule, self.log = estimator, rule, log
        self.delays: dict[int, dict[str, float]] = {}
        self._every = 1  # of so many iterations the delays of one are kept
        self._start, self._announce = start, announce
        self._workers = tuple(workers)
        self._through: dict[int, Mapping[int, str]] = {}  # by stage, as last reported
        self._pending: tuple[Proposal, Decision, Change] | None = None
        self._starvation = Starvation(start.stages)
        self._reports: dict[int, dict[int, StageReport]] = {}  # by iteration and stage
        self._ran: dict[int, Schedule] = {}  # in recent iterations
        self._queue: queue.SimpleQueue[StageReport | Proposal | threading.Event | None]
        self._queue = queue.SimpleQueue()
        self._vote: Vote

    # Called by any thread.

    def start(self, vote: Vote) -> None:
        """Begin to plan for a `vote` that is about to begin."""
        self._vote = vote
        self.log.record.run(
            vote.first, start=self._start.to_json(), now=vote.in_force[SCHEDULE].to_json(),
            estimator=self.estimator.settings(), delays=self.estimator.delays(),
            rule=asdict(self.rule),
        )  # fmt: skip
        self._thread = threading.Thread(target=self._plan, name="adaptra-planner", daemon=True)
        self._thread.start()

    def report(self, report: StageReport) -> None:
        """Take the `report` of one stage; it is dropped where too many wait."""
        if self._queue.qsize() < MOST_JOBS:
            self._queue.put(report)

    def begins(self, iteration: int, bundle: Bundle) -> None:
        """All ranks run `bundle` in `iteration`."""
        self._ran[iteration] = bundle[SCHEDULE]
        self._ran.pop(iteration - RECENT, None)

    def closed(self, proposal: Proposal) -> None:
        """Training has reached the swap of a `proposal`: it is in force, or will never be."""
        self._queue.put(proposal)

    def drain(self, timeout: float = 30.0) -> None:
        """Wait until all reports so far are dealt with, but no longer than `timeout` seconds."""
        done = threading.Event()
        self._queue.put(done)
        done.wait(timeout)

    def close(self) -> None:
        """End the thread, for which this waits `waits.CLOSE` at most; log the last outcome."""
        self._queue.put(None)
        self._thread.join(waits.CLOSE)
        self.log.settle()

    # On the planning thread.

    def _plan(self) -> None:
        """The planning thread. An error in it costs a replan, not the training."""
        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, threading.Event):
                    item.set()
                elif isinstance(item, Proposal):
                    self._close(item)
                else:
                    self._take(item)
            except Exception as error:
                self._vote.failed("a replan has failed", error)

    def _take(self, report: StageReport) -> None:
        stages, iteration = self._start.stages, report.iteration
        recent = range(self._vote.iteration - RECENT, self._vote.iteration + RECENT)
        if report.stage not in range(stages) or iteration not in recent:
            return  # late, or nonsense
        for late in [i for i in self._reports if i not in recent]:
            del self._reports[late]  # a stage does not report any more, or not all
        row = self._reports.setdefault(iteration, {})
        row[report.stage] = report
        if len(row) == stages:
            del self._reports[iteration]
            reports = [row[s] for s in range(stages)]
            self._on_reports(iteration, reports)
            status = self._status(iteration)
            self._vote.publish(status)
            self.log.record.iteration(iteration, reports, status)

    def _status(self, iteration: int) -> dict[str, Any]:
        """What charts of the training show.

        `delays` in seconds per link, `alarms` the links that are out of their charts, and of the
        last decision the predicted seconds of an iteration and their lower bound.
        """
        status = {
            "iteration": iteration, "delays": self.estimator.delays() if self.delays else {},
            "alarms": self.estimator.alarms(), "replans": self.log.in_force,
        }  # fmt: skip
        if (last := self.log.last) is not None:
            status["predicted"] = (last.refreshed_ms or last.predicted_ms) / 1e3
            status["lower_bound"] = last.lower_bound_ms / 1e3
        return status

    def _on_reports(self, iteration: int, reports: Sequence[StageReport]) -> None:
        """All stages have reported an iteration: plan again if there is a reason."""
        self._through = {report.stage: report.through for report in reports}
        seconds = reports[0].seconds  # of the iteration before
        if seconds is not None:
            self.log.record_outcome(iteration - 1, seconds)
            if text := self._starvation.update(reports, seconds):
                self._vote.note(text)
        if iteration == self._vote.first:
            return  # allocators and caches warm up
        ran = self._ran.pop(iteration - 1, None)
        changed = self.replanner.observe(iteration, reports, ran)
        if self.estimator.unmet:
            self._vote.note(self.estimator.unmet)
        self._keep_delays(iteration)
        if ran is not None and self.replanner.predicted is not None:
            self._refresh_prediction(iteration, ran, self.replanner.predicted)
        in_force, possible = self._vote.in_force[SCHEDULE], self._vote.can_propose(iteration)
        change = self.replanner.propose(iteration, changed, in_force, possible)
        if self.replanner.stays:
            self._vote.note(self.replanner.stays)
        if change is not None and not self._propose(iteration, change):
            self.replanner.failed(change)

    def _keep_delays(self, iteration: int) -> None:
        """However long the training is, `delays` spans it and has so many rows at most."""
        if iteration % self._every == 0:
            self.delays[iteration] = self.estimator.delays()
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

    def _propose(self, iteration: int, change: Change) -> bool:
        """Put a change to the vote, and log why; False when that is not possible now."""
        before, plan = self._vote.in_force[SCHEDULE], change.plan
        stock = self.replanner.stock()
        proposal = self._vote.propose(iteration, scheduled(plan.schedule))
        if proposal is None:
            return False
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
        )
        self._pending = proposal, decision, change
        self.log.add(decision)
        return True

    def _link_change(self, link: Link, before: float, change: Change) -> LinkChange:
        ends = [
            LinkEnd(stage, *self._workers[stage], self._through.get(stage, {}).get(other, ""))
            for stage, other in (link, link[::-1])
        ]
        now, wire = change.conditions.link(*link), change.conditions.wire(*link)
        return LinkChange(
            ends[0],
            ends[1],
            delay_before_ms=1e3 * before,
            delay_ms=1e3 * now.delay,
            wire_ms=1e3 * wire,
            bandwidth=now.bandwidth if wire else None,
        )

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
