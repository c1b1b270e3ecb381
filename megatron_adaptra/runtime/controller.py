"""The replan loop: stages report, the leader estimates and plans, all swap together.

A stage 0 leads. The others are the stages of its pipeline, which report, and ranks that have to run
the same order because they meet these in collectives (tensor parallel ones), which follow. Reports
and verdicts travel on channels of their own, handled by threads, and the leader plans in a thread
of its own; the training thread only looks, at an iteration boundary, which plan is in force.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from megatron_adaptra.errors import AdaptraError, PeerLost
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.log import log_line
from megatron_adaptra.plan import Plan, make_plan
from megatron_adaptra.plan.baselines import first_schedule
from megatron_adaptra.runtime.agreement import Ballot, Proposal, pack, unpack
from megatron_adaptra.runtime.channel import Channel
from megatron_adaptra.runtime.decisions import Decision, DecisionLog, sentence, warmups, why_swap
from megatron_adaptra.runtime.replan_policy import ReplanPolicy
from megatron_adaptra.sim.clock import simulate
from megatron_adaptra.telemetry.estimate import WINDOW, Estimator
from megatron_adaptra.telemetry.probe import IterationRecord

SETTLE = 2  # iterations between a proposal and its swap, doubled after one that was aborted
LONGEST_SETTLE = 64
_FOREVER = 7 * 86400.0  # seconds a control thread waits for the next message
TRIAL = 5  # iterations of a trial
LEARN = 4  # iterations between two comparisons of the model with what it models
OUTCOME = 3  # iterations whose median is the measured outcome of a decision

Link = tuple[int, int]


class Controller:
    """One rank's part in the loop. The leader has an Estimator, the others have none.

    `schedule` is the one to come back to when no link is slow, and to start with unless `resumed`
    from a checkpoint is another. `trial`: what the first iterations run, for its ops' costs.
    `first`: the first iteration of this process. `reports`: whether
    this rank is of the leader's own pipeline. `watcher`: the channel to whoever shows the leader's
    status. `announce`: the leader says its decisions aloud.
    """

    def __init__(
        self,
        stage: int,
        schedule: Schedule,
        channels: Mapping[int, Channel],
        estimator: Estimator | None,
        rule: ReplanPolicy,
        log: DecisionLog,
        timeout: float = 60.0,
        *,
        resumed: Schedule | None = None,
        trial: Schedule | None = None,
        first: int = 0,
        reports: bool = True,
        watcher: int | None = None,
        announce: bool = False,
    ) -> None:
        self.stage, self.estimator, self.rule, self.log = stage, estimator, rule, log
        self.ballot = Ballot(resumed) if resumed else Ballot(schedule, trial, first + TRIAL)
        self._start, self._first, self._reporting = schedule, first, reports
        self._watcher, self._announce = watcher, announce
        self.status: dict[str, Any] = {}  # leader and watcher: see _tell_watcher
        self.delays: list[dict[str, float]] = []  # leader: per iteration, seconds per link
        self._channels, self._timeout = dict(channels), timeout
        self._proposal: Proposal | None = None  # leader: the one under way, ...
        self._reason: dict[Link, float] = {}  # ... and the links it is for, with their old delay
        self._changed: dict[Link, float] = {}  # leader: the same for links not yet planned for
        self._unfit = False  # leader: a plan in force may take more memory than there is
        self._since = 0  # leader: the first iteration of the plan in force
        self._settle_in = SETTLE
        self._proposed: Decision | None = None
        self._awaited: list[Decision] = []  # leader: committed, the outcome not known
        self._reports: dict[int, dict[int, dict[str, Any]]] = {}
        self._last: IterationRecord | None = None
        self._ran: dict[int, Schedule] = {}  # leader: what recent iterations ran
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[dict[str, Any] | threading.Event | None]
        self._queue = queue.SimpleQueue()  # leader: reports for the planning thread
        self._threads = [
            threading.Thread(
                target=self._listen, args=(c,), name=f"adaptra-control-{p}", daemon=True
            )
            for p, c in self._channels.items()
        ]
        self._planner = threading.Thread(target=self._plan, name="adaptra-planner", daemon=True)
        if self.leads:
            self._planner.start()
        for thread in self._threads:
            thread.start()

    @property
    def leads(self) -> bool:
        return self.estimator is not None

    def begin(self, iteration: int) -> Schedule:
        """Called by the training thread at a boundary: the schedule to run."""
        settled = self.ballot.at_boundary(iteration, self._timeout, self.leads)
        if settled is not None and self.leads:
            self._settle(settled)
        if self.leads:
            self._ran[iteration] = self.ballot.schedule
        return self.ballot.schedule

    def report(self, record: IterationRecord) -> None:
        """Called by the training thread when the pipeline part of an iteration is over."""
        if not self._reporting:
            return
        message = {"kind": "report", **record.report(), **self._previous()}
        self._last = record
        if self.leads:
            self._queue.put(message)
        else:
            self._channels[0].send(message)

    def drain(self, timeout: float = 30.0) -> None:
        """Leader: wait until what has been reported so far is weighed."""
        done = threading.Event()
        self._queue.put(done)
        done.wait(timeout)

    def close(self) -> None:
        """End the control threads: the leader says goodbye, the others answer."""
        if self.leads:
            for channel in self._channels.values():
                with contextlib.suppress(PeerLost):
                    channel.send({"kind": "bye"})
        for thread in self._threads:
            thread.join(timeout=10.0)
        if self.leads:
            self._queue.put(None)
            self._planner.join(timeout=10.0)
            if self.log.decisions:
                self.log.write()  # with what is known of the last outcome

    def _previous(self) -> dict[str, Any]:
        """The step and the whole of the last iteration, which had not ended when it reported."""
        last = self._last
        if last is None or not last.end:
            return {"step": None, "seconds": None}
        return {"step": last.step, "seconds": last.end - last.begin}

    def _listen(self, channel: Channel) -> None:
        """The control thread of one channel."""
        try:
            while True:
                message = channel.receive(_FOREVER)
                if message["kind"] == "report":
                    self._queue.put(message)
                elif message["kind"] == "ack":
                    self._take_ack(message["number"], channel.peer, message["ok"])
                elif message["kind"] == "propose":
                    channel.send(self._consider(message))
                elif message["kind"] == "verdict":
                    self.ballot.decide(message["number"], message["commit"])
                elif message["kind"] == "status":
                    self.status = message["status"]
                elif message["kind"] == "bye":
                    if not self.leads:
                        channel.send({"kind": "bye"})
                        channel.flush()
                    return
        except PeerLost:
            if not self.leads:
                self.ballot.lose_leader()
            return  # the training thread meets the same loss, and names it

    def _consider(self, message: dict[str, Any]) -> dict[str, Any]:
        """A follower's answer to a proposal."""
        schedule = self.ballot.schedule
        try:
            proposal = unpack(message, schedule.stages, schedule.microbatches)
            ok = self.ballot.offer(proposal)
        except AdaptraError:
            ok = False
        return {"kind": "ack", "number": message["number"], "ok": ok}

    # What follows runs on the leader only.

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
                self._weigh(report["iteration"], [row[s] for s in range(stages)])
                self._tell_watcher(report["iteration"])

    def _tell_watcher(self, iteration: int) -> None:
        """What charts of the training show: `delays` in seconds per link, and of the last decision
        the predicted seconds of an iteration and their lower bound."""
        committed = [d for d in self.log.decisions if d.committed]
        self.status = {
            "iteration": iteration, "delays": dict(self.delays[-1]) if self.delays else {},
            "replans": len(committed),
        }  # fmt: skip
        if committed:
            last = committed[-1]
            self.status["predicted"] = (last.renewed_ms or last.predicted_ms) / 1e3
            self.status["lower_bound"] = last.lower_bound_ms / 1e3
        if self._watcher is not None:
            self._channels[self._watcher].send({"kind": "status", "status": self.status})

    def _weigh(self, iteration: int, reports: Sequence[dict[str, Any]]) -> None:
        """All reports of an iteration are in: is it time for another plan?"""
        assert self.estimator is not None
        seconds = reports[0]["seconds"]
        self._record_outcome(iteration, seconds)
        if iteration == self._first:
            return  # allocators and caches warm up
        changed = self.estimator.update(reports)
        self._unfit |= self.estimator.measure_budget(reports)
        self.delays.append(self.estimator.delays())
        ran = self._ran.pop(iteration - 1, None)
        if ran is not None and seconds is not None and iteration % LEARN == 0:
            plain = self.estimator.conditions(corrected=False)
            predicted = self.rule.evaluate(ran, plain).predicted
            self.estimator.learn(predicted, seconds)
            self._renew(iteration, ran, predicted)
        if self.rule.fixed:
            return
        if self._unfit and self._proposal is None:
            self._fit(iteration)
        for link in changed:
            self._changed.setdefault(link, self.estimator.charts[link].level or 0.0)
        if self._proposal is not None or self.ballot.opening:
            return
        if iteration < self._since:  # of the plan before: what really has changed shows again
            self._changed = {}
            return
        if not self._changed:
            if iteration % LEARN == 0 and self.estimator.settled:
                self._reconsider(iteration)
            return
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
        if self._decide(iteration, why, plan, current, conditions, time.perf_counter() - began):
            self._reason = before
        else:
            self._changed = before

    def _fit(self, iteration: int) -> None:
        """What stages may hold has become known in microbatches: keep to it."""
        assert self.estimator is not None
        now, budgets = self.ballot.schedule, self.estimator.budgets
        if now.chunks == 1:
            self._start = first_schedule(now.stages, now.microbatches, budgets)
        conditions = self.estimator.conditions()
        current = self.rule.evaluate(now, conditions)
        self._unfit = False
        over = [s for s, most in enumerate(current.peak_in_flight) if most > budgets[s]]
        if over:
            self._unfit = True  # until a plan that fits is in force
            held, may = current.peak_in_flight[over[0]], budgets[over[0]]
            why = f"stage {over[0]} holds {held:g} microbatches, its memory is for {may:.4g}"
            self._decide(iteration, why, self._choose(conditions), current, conditions, 0.0)

    def _renew(self, iteration: int, ran: Schedule, predicted: float) -> None:
        committed = [d for d in self.log.decisions if d.committed]
        last = committed[-1] if committed else None
        if last is None or last.renewed_ms is not None or last.digest != ran.digest():
            return
        if iteration > last.iteration + WINDOW:
            last.renewed_ms = 1e3 * predicted
            self.log.write()

    def _reconsider(self, iteration: int) -> None:
        """Whether the plan in force is still needed: it was made from a few hasty samples."""
        assert self.estimator is not None
        if self.ballot.schedule.order == self._start.order:
            return
        began = time.perf_counter()
        conditions = self.estimator.conditions()
        current = self.rule.evaluate(self.ballot.schedule, conditions)
        start = self.rule.evaluate(self._start, conditions)
        if self.rule.spares(start, current):
            self._reason = {}
            why = f"a deeper warmup gains too little now: back to 1F1B ({warmups(current, start)})"
            self._decide(iteration, why, start, current, conditions, time.perf_counter() - began)

    def _decide(
        self,
        iteration: int,
        why: str,
        plan: Plan,
        current: Plan,
        conditions: Conditions,
        planning: float,
    ) -> bool:
        """Propose the plan, and log why; False when training has reached the swap meanwhile."""
        swap = self.ballot.iteration + self._settle_in
        if not self._propose(len(self.log.decisions), swap, plan.schedule):
            return False
        self._proposed = Decision(
            iteration=swap,
            detected=iteration,
            why=why,
            warmup_before=list(self.ballot.schedule.warmup),
            warmup_after=list(plan.schedule.warmup),
            predicted_ms=1e3 * plan.predicted,
            predicted_without_ms=1e3 * current.predicted,
            stock=self.stock(),
            lower_bound_ms=1e3 * plan.lower_bound,
            planning_ms=1e3 * planning,
            digest=plan.schedule.digest(),
            plan=plan.schedule.text(),
            conditions=conditions.to_json(),
        )
        self.log.add(self._proposed)
        return True

    def _choose(self, conditions: Conditions) -> Plan:
        """The policy's plan where it is clearly faster, else the first: memory is precious."""
        start = self.rule.evaluate(self._start, conditions)
        plan = self.rule.make_plan(conditions)
        return plan if self.rule.gains(plan, start) else start

    def stock(self) -> Timeline:
        """What unchanged Megatron would do now: it posts a receive when it needs the message."""
        assert self.estimator is not None
        conditions = self.estimator.conditions(native=True)
        policy = "interleaved" if conditions.chunks > 1 else "1f1b"
        schedule = make_plan(conditions, policy, self.rule.sends).schedule
        return simulate(lower(schedule, 0), conditions, self.rule.sends)

    def _propose(self, number: int, swap: int, schedule: Schedule) -> bool:
        """Ask all stages; False when training has reached the swap while we planned."""
        proposal = Proposal(number, swap, schedule)
        if not self.ballot.offer(proposal):
            return False
        self._proposal = proposal
        for channel in self._channels.values():
            channel.send(pack(number, swap, schedule))
        return True

    def _take_ack(self, number: int, stage: int, ok: bool) -> None:
        with self._lock:
            proposal = self._proposal
            if proposal is None or proposal.number != number:
                return
            if not ok:
                self.ballot.decide(number, False)
            proposal.acks.add(stage)
            if len(proposal.acks) == len(self._channels):
                self.ballot.decide(number, True)
                self._send_verdict(proposal)

    def _settle(self, proposal: Proposal) -> None:
        """The leader has reached the swap: a proposal that is still open is aborted by that."""
        with self._lock:
            if not proposal.verdict:
                self._send_verdict(proposal)
            self._proposal = None
            if proposal.verdict:
                assert self._proposed is not None
                self._proposed.committed = True
                self._awaited.append(self._proposed)
                self._since, self._changed = proposal.swap, {}
                self._settle_in = SETTLE
                if self._announce:
                    log_line(sentence(self._proposed))
            else:  # the reason still stands: try again, with more time for the answers
                self._changed = {**self._changed, **self._reason}
                self._settle_in = min(2 * self._settle_in, LONGEST_SETTLE)
            self.log.write()

    def _send_verdict(self, proposal: Proposal) -> None:
        commit = bool(proposal.verdict)
        for channel in self._channels.values():
            channel.send({"kind": "verdict", "number": proposal.number, "commit": commit})

    def _record_outcome(self, iteration: int, seconds: float | None) -> None:
        """`seconds` are those of the iteration before; the swap's own iteration does not count."""
        ran = iteration - 1
        in_force = [d for d in self._awaited if d.iteration <= ran][-1:]
        if not in_force or seconds is None:
            return
        decision = in_force[0]
        self._awaited = self._awaited[self._awaited.index(decision) :]
        if decision.iteration == ran:
            return
        decision.samples.append(1e3 * seconds)
        decision.measured_ms = median(decision.samples)
        if len(decision.samples) == OUTCOME:
            self._awaited.remove(decision)
            self.log.write()
