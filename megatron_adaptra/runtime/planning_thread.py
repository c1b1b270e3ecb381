"""What plans beside a training: a thread that gets reports and votes, and proposes bundles.

`replan_loop` is the one of a pipeline, `replica_loop` that of several replicas.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from megatron_adaptra import waits
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.log import log_line
from megatron_adaptra.runtime.agreement import Proposal
from megatron_adaptra.runtime.bundle import SCHEDULE, Bundle
from megatron_adaptra.runtime.controller import MOST_JOBS
from megatron_adaptra.runtime.decisions import WARMUP, Decision, DecisionLog, Worker, sentence
from megatron_adaptra.telemetry.op_seconds import WINDOW
from megatron_adaptra.telemetry.report import StageReport

RECENT = 256  # iterations of which it is kept what ran, and what some workers have reported
KEPT = 512  # iterations whose delays are kept

C = TypeVar("C")  # a change of plan


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


class PlanningThread(ABC, Generic[C]):
    """Has what it plans put to the vote, so that training goes on meanwhile.

    Args:
        start: the schedule to come back to when nothing is slow.
        log: of decisions, and the record of the run.
        workers: all that report, by number.
        announce: decisions go to the log of the training, too.

    `delays` has, by iteration, the seconds of each link; of a long training every second iteration,
    or every fourth, and so on. No error leaves the thread: it costs a replan, and is logged once.
    """

    def __init__(
        self,
        start: Schedule,
        log: DecisionLog,
        workers: Sequence[Worker],
        *,
        announce: bool = False,
    ) -> None:
        self.log = log
        self.delays: dict[int, dict[str, float]] = {}
        self._every = 1  # of so many iterations the delays of one are kept
        self._start, self._announce = start, announce
        self._workers = tuple(workers)
        self._through: dict[int, Mapping[int, str]] = {}  # by worker, as last reported
        self._pending: tuple[Proposal, Decision, C] | None = None
        self._reports: dict[int, dict[int, StageReport]] = {}  # by iteration and worker
        self._ran: dict[int, Schedule] = {}  # in recent iterations
        self._queue: queue.SimpleQueue[StageReport | Proposal | threading.Event | None]
        self._queue = queue.SimpleQueue()
        self._vote: Vote

    # Called by any thread.

    def start(self, vote: Vote) -> None:
        """Begin to plan for a `vote` that is about to begin."""
        self._vote = vote
        self._begin(vote)
        self._thread = threading.Thread(target=self._plan, name="adaptra-planner", daemon=True)
        self._thread.start()

    def report(self, report: StageReport) -> None:
        """Take the `report` of one worker; it is dropped where too many wait."""
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

    @abstractmethod
    def state(self) -> dict[str, float]:
        """What is planned for, to go on from after a restart: seconds per link."""

    # On the planning thread.

    @abstractmethod
    def _begin(self, vote: Vote) -> None:
        """A run begins: say so in its record. Before the thread is there."""

    @abstractmethod
    def _on_reports(self, iteration: int, reports: Mapping[int, StageReport]) -> None:
        """All workers have reported an iteration: plan again if there is a reason."""

    @abstractmethod
    def _measured(self) -> tuple[dict[str, float], list[str]]:
        """Seconds of each link now, and the links, or workers, that are out of their charts."""

    @abstractmethod
    def _over(self, change: C, proposal: Proposal) -> None:
        """What was proposed is in force, or never will be: see `proposal.committed`."""

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
        delays, alarms = self._measured()
        status = {
            "iteration": iteration, "delays": delays if self.delays else {},
            "alarms": alarms, "replans": self.log.in_force,
        }  # fmt: skip
        if (last := self.log.last) is not None:
            status["predicted"] = (last.refreshed_ms or last.predicted_ms) / 1e3
            status["lower_bound"] = last.lower_bound_ms / 1e3
        return status

    def _keep_delays(self, iteration: int) -> None:
        """However long the training is, `delays` spans it and has so many rows at most."""
        if iteration % self._every == 0:
            self.delays[iteration] = self._measured()[0]
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
            self._over(change, proposal)
            self.log.commit(decision)
            if self._announce:
                log_line(sentence(decision))
                self._vote.note(WARMUP)
        else:  # the reason still stands: try again
            self.log.refuse(decision)
            self._over(change, proposal)
