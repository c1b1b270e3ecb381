"""The leader of the replan loop: from the stages' reports to a plan that all of them run.

It plans in a thread of its own, so that training goes on meanwhile.
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_adaptra import waits
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.log import log_line
from megatron_adaptra.runtime.agreement import (
    LONGEST_SWAP_LEAD,
    Ballot,
    Board,
    Proposal,
    pack,
)
from megatron_adaptra.runtime.channel import Channel
from megatron_adaptra.runtime.controller import MOST_JOBS, Controller
from megatron_adaptra.runtime.decisions import Decision, DecisionLog, sentence
from megatron_adaptra.runtime.replan_policy import ReplanPolicy
from megatron_adaptra.runtime.replanner import Change, Replanner
from megatron_adaptra.telemetry.estimate import WINDOW, Estimator
from megatron_adaptra.telemetry.starvation import Starvation

SWAP_LEAD = 2  # iterations between a proposal and its swap, doubled after one that was aborted
RECENT = 256  # iterations of which it is kept what ran, and what some stages have reported
KEPT = 512  # iterations whose delays are kept


@dataclass
class _Open:
    """A proposal under way, and its decision."""

    proposal: Proposal
    decision: Decision
    change: Change


class Leader(Controller):
    """Estimates, plans and proposes.

    `start`: the schedule to come back to when no link is slow. `ballot`, `channels`, `board`,
    `first`: see Controller. `watcher`: the channel to whoever shows the status in charts.
    `announce`: say decisions aloud. `delays` has, by iteration, the seconds of each link; of a long
    training every second iteration, or every fourth, and so on.
    """

    def __init__(
        self,
        start: Schedule,
        ballot: Ballot,
        channels: Mapping[int, Channel],
        board: Board,
        estimator: Estimator,
        rule: ReplanPolicy,
        log: DecisionLog,
        *,
        first: int = 0,
        watcher: int | None = None,
        announce: bool = False,
    ) -> None:
        super().__init__(ballot, channels, board, first)
        self.replanner = Replanner(start, estimator, rule)
        self.estimator, self.rule, self.log = estimator, rule, log
        self.delays: dict[int, dict[str, float]] = {}
        self._every = 1  # of so many iterations the delays of one are kept
        self._watcher, self._announce = watcher, announce
        self._token = f"decision/{secrets.token_hex(8)}"  # no other leader's decisions are ours
        self._proposed = 0
        self._not_before = 0  # the iteration from which on the board is tried again
        self._open: _Open | None = None  # only the planning thread looks at it
        self._swap_lead = SWAP_LEAD
        self._starvation = Starvation(start.stages)
        log.record.run(
            first, start=start.to_json(), now=ballot.schedule.to_json(),
            estimator=estimator.settings(), delays=estimator.delays(), rule=asdict(rule),
        )  # fmt: skip
        self._reports: dict[int, dict[int, dict[str, Any]]] = {}  # by iteration and stage
        self._ran: dict[int, Schedule] = {}  # in recent iterations
        self._in_turn = threading.Lock()  # a proposal is sent before its decision
        self._queue: queue.SimpleQueue[dict[str, Any] | Proposal | threading.Event | None]
        self._queue = queue.SimpleQueue()  # reports for the planning thread
        self._planner = threading.Thread(target=self._plan, name="adaptra-planner", daemon=True)
        self._planner.start()
        self._start_threads()

    # Called by the training thread.

    def begin(self, iteration: int) -> Schedule:
        """As for Controller, at `iteration`; never waits for members."""
        closed = self.ballot.at_boundary(iteration, 0.0, leads=True)
        if closed is not None:
            if not closed.committed:
                self._tell(closed)
            self._queue.put(closed)
        self._ran[iteration] = self.ballot.schedule
        self._ran.pop(iteration - RECENT, None)
        return self.ballot.schedule

    def drain(self, timeout: float = 30.0) -> None:
        """Wait until all reports so far are dealt with, but no longer than `timeout` seconds."""
        done = threading.Event()
        self._queue.put(done)
        done.wait(timeout)

    def close(self) -> None:
        """End this run's plans: all members leave, and the log has the last outcome.

        Waits `waits.GOODBYE` at most for the members, and the same for each of its own threads.
        """
        super().close()
        self._queue.put(None)
        self._planner.join(waits.GOODBYE)
        self.log.settle()

    def _take_leave(self) -> None:
        for channel in self._channels.values():
            self._send(channel, {"kind": "bye"})

    def _report(self, report: dict[str, Any]) -> None:
        if self._queue.qsize() < MOST_JOBS:
            self._queue.put(report)

    def _tell(self, proposal: Proposal) -> None:
        """Pass a decision on, soon and after its proposal."""
        with self._in_turn:
            self._jobs.put(lambda: self._send_decision(proposal))

    # On the control threads.

    def _on_message(self, channel: Channel, message: dict[str, Any]) -> bool:
        if message["kind"] == "report":
            self._report(message)
        elif message["kind"] == "ack":
            voters = len(self._channels)
            decided = self.ballot.acknowledge(
                message["number"], channel.peer, message["ok"], voters
            )
            if decided is not None:
                self._tell(decided)
        return bool(message["kind"] != "bye")

    def _send_proposal(self, proposal: Proposal) -> None:
        message = pack(proposal)
        for channel in self._channels.values():
            if not self._send(channel, message):
                self.ballot.decide(proposal.number, False)

    def _send_decision(self, proposal: Proposal) -> None:
        number, commit = proposal.number, bool(proposal.committed)
        for channel in self._channels.values():
            self._send(channel, {"kind": "verdict", "number": number, "commit": commit})

    # On the planning thread.

    def _plan(self) -> None:
        """The planning thread. An error in it costs a replan, not the training."""
        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, threading.Event):
                    item.set()
                elif isinstance(item, Proposal):
                    self._close_proposal(item)
                else:
                    self._take_report(item)
            except Exception as error:
                self._say("a replan has failed", error)

    def _take_report(self, report: dict[str, Any]) -> None:
        stages, iteration = self.ballot.schedule.stages, report["iteration"]
        recent = range(self.ballot.iteration - RECENT, self.ballot.iteration + RECENT)
        if report["stage"] not in range(stages) or iteration not in recent:
            return  # late, or nonsense
        for late in [i for i in self._reports if i not in recent]:
            del self._reports[late]  # a stage does not report any more, or not all
        row = self._reports.setdefault(iteration, {})
        row[report["stage"]] = report
        if len(row) == stages:
            del self._reports[iteration]
            reports = [row[s] for s in range(stages)]
            self._on_reports(iteration, reports)
            self._send_status(iteration)
            self.log.record.iteration(iteration, reports, self.status)

    def _send_status(self, iteration: int) -> None:
        """What charts of the training show.

        `delays` in seconds per link, `alarms` the links that are out of their charts, and of the
        last decision the predicted seconds of an iteration and their lower bound.
        """
        self.status = {
            "iteration": iteration, "delays": self.estimator.delays() if self.delays else {},
            "alarms": self.estimator.alarms(), "replans": self.log.in_force,
        }  # fmt: skip
        if (last := self.log.last) is not None:
            self.status["predicted"] = (last.refreshed_ms or last.predicted_ms) / 1e3
            self.status["lower_bound"] = last.lower_bound_ms / 1e3
        if self._watcher is not None:
            self._send(self._channels[self._watcher], {"kind": "status", "status": self.status})

    def _on_reports(self, iteration: int, reports: Sequence[dict[str, Any]]) -> None:
        """All stages have reported an iteration: plan again if there is a reason."""
        seconds = reports[0]["seconds"]  # of the iteration before
        if seconds is not None:
            self.log.record_outcome(iteration - 1, seconds)
            if said := self._starvation.update(reports, seconds):
                self._say_once(said)
        if iteration == self.first:
            return  # allocators and caches warm up
        ran = self._ran.pop(iteration - 1, None)
        changed = self.replanner.observe(iteration, reports, ran)
        self._keep_delays(iteration)
        if ran is not None and self.replanner.predicted is not None:
            self._refresh_prediction(iteration, ran, self.replanner.predicted)
        possible = self._open is None and not self.ballot.opening
        possible = possible and iteration >= self._not_before and not self._misses_somebody()
        change = self.replanner.propose(iteration, changed, self.ballot.schedule, possible)
        if change is not None and not self._propose(iteration, change):
            self.replanner.failed(change)

    def _keep_delays(self, iteration: int) -> None:
        """However long the training is, `delays` spans it and has so many rows at most."""
        if iteration % self._every == 0:
            self.delays[iteration] = self.estimator.delays()
        if len(self.delays) > KEPT:
            self._every *= 2
            self.delays = {i: row for i, row in self.delays.items() if i % self._every == 0}

    def _misses_somebody(self) -> bool:
        """Whether a member cannot be asked, so that no plan can come into force."""
        return any(channel.lost for channel in self._channels.values())

    def _refresh_prediction(self, iteration: int, ran: Schedule, predicted: float) -> None:
        """Once the model is fed with what was measured under the plan in force alone."""
        last = self.log.last
        if last is None or last.refreshed_ms is not None or last.digest != ran.digest():
            return
        if iteration > last.iteration + WINDOW:
            self.log.refresh(last, 1e3 * predicted)

    def _propose(self, iteration: int, change: Change) -> bool:
        """Propose a change to all, and log why; False when that is not possible now."""
        plan, stock, number = change.plan, self.replanner.stock(), self._proposed
        self._proposed += 1
        proposal = Proposal(number, 0, plan.schedule, Board.key(self._token, number))
        if not self._board.write(proposal):
            self._say("a new plan cannot be agreed on: torch's key-value store does not answer")
            self._not_before = iteration + LONGEST_SWAP_LEAD
            return False
        proposal.swap = swap = self.ballot.iteration + self._swap_lead
        with self._in_turn:
            if not self.ballot.offer(proposal):
                return False
            self._jobs.put(lambda: self._send_proposal(proposal))
        decision = Decision(
            number=self.log.made,
            iteration=swap,
            detected=iteration,
            why=change.why,
            warmup_before=list(self.ballot.schedule.warmup),
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
        self._open = _Open(proposal, decision, change)
        self.log.add(decision)
        return True

    # The end of a proposal.

    def _close_proposal(self, proposal: Proposal) -> None:
        """Training has reached the swap, or has gone past it."""
        self._board.write(proposal)  # on another thread than the one that tells the members
        closing, self._open = self._open, None
        if closing is None or closing.proposal is not proposal:
            return
        if proposal.committed:
            self.replanner.swapped(proposal.swap)
            self._swap_lead = SWAP_LEAD
            self.log.commit(closing.decision)
            if self._announce:
                log_line(sentence(closing.decision))
        else:  # the reason still stands: try again, with more time for the answers
            self.replanner.failed(closing.change)
            self._swap_lead = min(2 * self._swap_lead, LONGEST_SWAP_LEAD)
