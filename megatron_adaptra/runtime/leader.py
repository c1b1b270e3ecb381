"""The leader of the replan loop: from the stages' reports to a plan that all of them run.

It plans in a thread of its own, so that training goes on meanwhile.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_adaptra.errors import PeerLost
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.log import log_line
from megatron_adaptra.plan import Plan, make_plan
from megatron_adaptra.plan.baselines import first_schedule
from megatron_adaptra.runtime.agreement import Ballot, Proposal, pack
from megatron_adaptra.runtime.channel import Channel
from megatron_adaptra.runtime.controller import Controller
from megatron_adaptra.runtime.decisions import Decision, DecisionLog, sentence, warmups, why_swap
from megatron_adaptra.runtime.replan_policy import ReplanPolicy
from megatron_adaptra.sim.clock import simulate
from megatron_adaptra.telemetry.estimate import WINDOW, Estimator
from megatron_adaptra.telemetry.probe import IterationRecord

SWAP_LEAD = 2  # iterations between a proposal and its swap, doubled after one that was aborted
LONGEST_SWAP_LEAD = 64
LEARN = 4  # iterations between two comparisons of the model with what it models
_GOODBYE = 10.0  # seconds that `close` waits for the planning thread

Link = tuple[int, int]


@dataclass
class _Open:
    """A proposal under way, its decision, and the links it is for, with their old delays."""

    proposal: Proposal
    decision: Decision
    reason: dict[Link, float]


class Leader(Controller):
    """Estimates, plans and proposes.

    `start`: the schedule to come back to when no link is slow. `ballot`, `channels`: see
    Controller. `first`: the first iteration of this process. `watcher`: the channel to whoever
    shows the status in charts. `announce`: say decisions aloud. `delays` has, per iteration, the
    seconds of each link.
    """

    def __init__(
        self,
        start: Schedule,
        ballot: Ballot,
        channels: Mapping[int, Channel],
        estimator: Estimator,
        rule: ReplanPolicy,
        log: DecisionLog,
        *,
        first: int = 0,
        watcher: int | None = None,
        announce: bool = False,
    ) -> None:
        super().__init__(ballot, channels)
        self.estimator, self.rule, self.log = estimator, rule, log
        self.delays: list[dict[str, float]] = []
        self._start, self._first, self._watcher, self._announce = start, first, watcher, announce
        self._open: _Open | None = None
        self._changed: dict[Link, float] = {}  # links not yet planned for, with their old delays
        self._over_budget = False  # a plan in force may take more memory than there is
        self._since = 0  # the first iteration of the plan in force
        self._swap_lead = SWAP_LEAD
        self._reports: dict[int, dict[int, dict[str, Any]]] = {}  # by iteration and stage
        self._ran: dict[int, Schedule] = {}  # in recent iterations
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[dict[str, Any] | threading.Event | None]
        self._queue = queue.SimpleQueue()  # reports for the planning thread
        self._planner = threading.Thread(target=self._plan, name="adaptra-planner", daemon=True)
        self._planner.start()
        self._start_listening()

    # Called by the training thread.

    def begin(self, iteration: int) -> Schedule:
        """As for Controller, at `iteration`; never waits for members."""
        if self.ballot.at_boundary(iteration, 0.0, leads=True) is not None:
            self._close_proposal()
        self._ran[iteration] = self.ballot.schedule
        return self.ballot.schedule

    def report(self, record: IterationRecord) -> None:
        """Give it to the planning thread."""
        self._queue.put(self._report_of(record))

    def drain(self, timeout: float = 30.0) -> None:
        """Wait until all reports so far are dealt with, but no longer than `timeout` seconds."""
        done = threading.Event()
        self._queue.put(done)
        done.wait(timeout)

    def close(self) -> None:
        """End training's plans: all members leave, and the log has its last outcome.

        Waits ten seconds at most for each control thread and for the planning thread.
        """
        for channel in self._channels.values():
            with contextlib.suppress(PeerLost):
                channel.send({"kind": "bye"})
        super().close()
        self._queue.put(None)
        self._planner.join(_GOODBYE)
        self.log.close()

    def stock(self) -> Timeline:
        """What unchanged Megatron would do now: it posts a receive when it needs the message."""
        conditions = self.estimator.conditions(native=True)
        policy = "interleaved" if conditions.chunks > 1 else "1f1b"
        schedule = make_plan(conditions, policy, self.rule.sends).schedule
        return simulate(lower(schedule, 0), conditions, self.rule.sends)

    # On the control threads.

    def _on_message(self, channel: Channel, message: dict[str, Any]) -> bool:
        if message["kind"] == "report":
            self._queue.put(message)
        elif message["kind"] == "ack":
            self._take_ack(message["number"], channel.peer, message["ok"])
        return bool(message["kind"] != "bye")

    def _on_loss(self) -> None:
        """Nothing to do: the training thread meets the same loss, and names it."""

    def _take_ack(self, number: int, member: int, ok: bool) -> None:
        with self._lock:
            if self._open is None or self._open.proposal.number != number:
                return
            proposal = self._open.proposal
            if not ok:
                self.ballot.decide(number, False)
            proposal.acks.add(member)
            if len(proposal.acks) == len(self._channels):
                self.ballot.decide(number, True)
                self._send_decision(proposal)

    # On the planning thread.

    def _plan(self) -> None:
        """The planning thread. An error in it costs a replan, not the training."""
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._take_report(item)
            except PeerLost:
                return  # the training thread meets the same loss, and names it
            except Exception as error:
                log_line(f"no replan at iteration {item['iteration']}, the plan stays: {error!r}")

    def _take_report(self, report: dict[str, Any]) -> None:
        with self._lock:
            stages = self.ballot.schedule.stages
            row = self._reports.setdefault(report["iteration"], {})
            row[report["stage"]] = report
            if len(row) == stages:
                del self._reports[report["iteration"]]
                self._on_reports(report["iteration"], [row[s] for s in range(stages)])
                self._send_status(report["iteration"])

    def _send_status(self, iteration: int) -> None:
        """What charts of the training show.

        `delays` in seconds per link, and of the last decision the predicted seconds of an iteration
        and their lower bound.
        """
        self.status = {
            "iteration": iteration, "delays": dict(self.delays[-1]) if self.delays else {},
            "replans": self.log.in_force,
        }  # fmt: skip
        if (last := self.log.last) is not None:
            self.status["predicted"] = (last.refreshed_ms or last.predicted_ms) / 1e3
            self.status["lower_bound"] = last.lower_bound_ms / 1e3
        if self._watcher is not None:
            self._channels[self._watcher].send({"kind": "status", "status": self.status})

    def _on_reports(self, iteration: int, reports: Sequence[dict[str, Any]]) -> None:
        """All stages have reported an iteration: plan again if there is a reason."""
        seconds = reports[0]["seconds"]  # of the iteration before
        if seconds is not None:
            self.log.record_outcome(iteration - 1, seconds)
        if iteration == self._first:
            return  # allocators and caches warm up
        changed = self.estimator.update(reports)
        self._over_budget |= self.estimator.measure_budget(reports)
        self.delays.append(self.estimator.delays())
        ran = self._ran.pop(iteration - 1, None)
        if ran is not None and seconds is not None and iteration % LEARN == 0:
            plain = self.estimator.conditions(corrected=False)
            predicted = self.rule.evaluate(ran, plain).predicted
            self.estimator.learn(predicted, seconds)
            self._refresh_prediction(iteration, ran, predicted)
        if self.rule.fixed:
            return
        if self._over_budget and self._open is None:
            self._replan_for_memory(iteration)
        for link in changed:
            self._changed.setdefault(link, self.estimator.charts[link].level or 0.0)
        if self._open is not None or self.ballot.opening:
            return
        if iteration < self._since:  # of the plan before: what really has changed shows again
            self._changed = {}
        elif self._changed:
            self._replan_for_links(iteration)
        elif iteration % LEARN == 0 and self.estimator.calibrated:
            self._reconsider(iteration)

    def _refresh_prediction(self, iteration: int, ran: Schedule, predicted: float) -> None:
        """Once the model is fed with what was measured under the plan in force alone."""
        last = self.log.last
        if last is None or last.refreshed_ms is not None or last.digest != ran.digest():
            return
        if iteration > last.iteration + WINDOW:
            self.log.refresh(last, 1e3 * predicted)

    def _replan_for_links(self, iteration: int) -> None:
        """Some delays have changed for good."""
        began = time.perf_counter()
        conditions = self.estimator.conditions()
        before, self._changed = self._changed, {}
        now = {link: conditions.link(*link).delay for link in before}
        eased = any(now[link] < before[link] for link in before)
        self.estimator.accept()
        current = self.rule.evaluate(self.ballot.schedule, conditions)
        plan = self._choose(conditions)
        if not self.rule.worth(plan, current, eased):
            return
        why = why_swap(before, now, current, plan, back=plan.schedule is self._start)
        seconds = time.perf_counter() - began
        if not self._propose(iteration, why, plan, current, conditions, seconds, before):
            self._changed = before

    def _replan_for_memory(self, iteration: int) -> None:
        """What stages may hold has become known in microbatches: keep to it."""
        now, budgets = self.ballot.schedule, self.estimator.budgets
        if now.chunks == 1:
            self._start = first_schedule(now.stages, now.microbatches, budgets)
        conditions = self.estimator.conditions()
        current = self.rule.evaluate(now, conditions)
        over = [s for s, most in enumerate(current.peak_in_flight) if most > budgets[s]]
        self._over_budget = bool(over)  # until a plan that fits is in force
        if over:
            held, may = current.peak_in_flight[over[0]], budgets[over[0]]
            why = f"stage {over[0]} holds {held:g} microbatches, its memory is for {may:.4g}"
            self._propose(iteration, why, self._choose(conditions), current, conditions)

    def _reconsider(self, iteration: int) -> None:
        """Whether the plan in force is still needed: it was made from a few hasty samples."""
        if self.ballot.schedule.order == self._start.order:
            return
        began = time.perf_counter()
        conditions = self.estimator.conditions()
        current = self.rule.evaluate(self.ballot.schedule, conditions)
        start = self.rule.evaluate(self._start, conditions)
        if self.rule.spares(start, current):
            why = f"a deeper warmup gains too little now: back to 1F1B ({warmups(current, start)})"
            seconds = time.perf_counter() - began
            self._propose(iteration, why, start, current, conditions, seconds)

    def _choose(self, conditions: Conditions) -> Plan:
        """The policy's plan where it is clearly faster, else the first: memory is precious."""
        start = self.rule.evaluate(self._start, conditions)
        plan = self.rule.make_plan(conditions)
        return plan if self.rule.gains(plan, start) else start

    def _propose(
        self,
        iteration: int,
        why: str,
        plan: Plan,
        current: Plan,
        conditions: Conditions,
        planning: float = 0.0,
        reason: Mapping[Link, float] | None = None,
    ) -> bool:
        """Propose a plan to all, and log why; False when training has reached the swap meanwhile.

        `current`: the plan in force. `planning`: the seconds that it took. `reason`: the links that
        the plan is for, with their old delays.
        """
        stock = self.stock()
        number, swap = self.log.made, self.ballot.iteration + self._swap_lead
        proposal = Proposal(number, swap, plan.schedule)
        if not self.ballot.offer(proposal):
            return False
        decision = Decision(
            number=number,
            iteration=swap,
            detected=iteration,
            why=why,
            warmup_before=list(self.ballot.schedule.warmup),
            warmup_after=list(plan.schedule.warmup),
            predicted_ms=1e3 * plan.predicted,
            predicted_without_ms=1e3 * current.predicted,
            stock=stock,
            lower_bound_ms=1e3 * plan.lower_bound,
            planning_ms=1e3 * planning,
            digest=plan.schedule.digest(),
            plan=plan.schedule.text(),
            conditions=conditions.to_json(),
        )
        self._open = _Open(proposal, decision, dict(reason or {}))
        for channel in self._channels.values():
            channel.send(pack(number, swap, plan.schedule))
        self.log.add(decision)
        return True

    # The end of a proposal.

    def _close_proposal(self) -> None:
        """The swap is reached: a proposal that is still open is aborted by that."""
        with self._lock:
            if (closing := self._open) is None:
                return
            self._open = None
            if closing.proposal.committed:
                self.log.commit(closing.decision)
                self._since, self._changed = closing.proposal.swap, {}
                self._swap_lead = SWAP_LEAD
                if self._announce:
                    log_line(sentence(closing.decision))
            else:  # the reason still stands: try again, with more time for the answers
                self._send_decision(closing.proposal)
                self._changed |= closing.reason
                self._swap_lead = min(2 * self._swap_lead, LONGEST_SWAP_LEAD)

    def _send_decision(self, proposal: Proposal) -> None:
        commit = bool(proposal.committed)
        for channel in self._channels.values():
            channel.send({"kind": "verdict", "number": proposal.number, "commit": commit})
