"""The loop of every remedy: a row of reports per iteration, one proposal, one open vote."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from megatron_adaptra.adapt.log import D, Decision, DecisionLog
from megatron_adaptra.adapt.switch import Acts, always
from megatron_adaptra.agree.agreement import Proposal
from megatron_adaptra.agree.bundle import Bundle
from megatron_adaptra.agree.controller import MOST_JOBS
from megatron_adaptra.base import waits
from megatron_adaptra.base.log import LogOnce, log_line
from megatron_adaptra.measure.reduction_report import ReductionReport
from megatron_adaptra.measure.replica_speed import ReplicaRow
from megatron_adaptra.measure.report import StageReport

RECENT_ITERATIONS = 256  # before and after the present one, for which reports are taken
SWAP_LEAD = 2  # iterations between a proposal and its swap, where nothing is in the way
OFF = "acting is off"


class Vote(Protocol):
    """A vote brings all ranks to run one bundle: a Leader, or a CountsVote.

    The loop's thread calls it. A method waits for torch's store at most, twice `waits.STORE`
    seconds.
    """

    first: int  # the first iteration of this run
    _once: LogOnce

    @property
    def in_force(self) -> Bundle:
        """The bundle that all ranks run now."""

    @property
    def iteration(self) -> int:
        """The last iteration that has begun."""

    def can_propose(self, iteration: int) -> bool:
        """Return whether a proposal made after the reports of `iteration` may come into force."""

    def propose(self, iteration: int, bundle: Bundle) -> Proposal | None:
        """Propose to all ranks a bundle to swap to, some iterations from now.

        Args:
            iteration: whose reports have led to it.
            bundle: read by each rank before it answers; it comes into force whole, or not at all.

        Returns:
            The open proposal; None if nothing can be proposed now. `Loop.closed` gets it when
            training has reached its swap, with `committed` set.
        """

    def settle(self, proposal: Proposal) -> None:
        """Make room for the next proposal: this one is over."""

    def publish(self, status: dict[str, Any]) -> None:
        """Show `status` in the charts of the training from now on."""

    def failed(self, what: str, error: Exception) -> None:
        """Log, once, that `what` has failed."""

    def note(self, text: str, about: str = "") -> None:
        """Log `text`, once; where it is `about` a subject, the first text of that alone."""
        self._once.line(text, about=about)


Report = StageReport | ReductionReport | ReplicaRow
R = TypeVar("R", bound=Report)


class Offer(NamedTuple):
    """An offer states what a planner's remedy would leave of an iteration after the last change.

    Args:
        number: counts the planner's offers, so that a new one can be recognised.
        leaves: expected share of an iteration's present seconds; 1 where the remedy does nothing.
        standing: the planner offers the same whatever changes.
    """

    number: int
    leaves: float
    standing: bool = False


# By name of an allowed remedy, the call that asks its planner; it returns None before an answer.
Offers = Mapping[str, Callable[[], Offer | None]]


class Proposed(NamedTuple, Generic[D]):
    """A remedy asks all ranks to run `bundle`.

    `decision`: for the log; None for what only prepares a later one.
    """

    bundle: Bundle
    decision: D | None = None


class Remedy(ABC, Generic[R, D]):
    """A remedy turns what ranks have measured into one proposal, and judges what came of it.

    The loop's thread calls it, but for `start` and `begins`.

    Args:
        senders: how many ranks report each iteration.
        log: of decisions.

    `vote`: that of the run, from `start` on. `explains`: a line that explains the words of its
    decisions, logged once after the first of them; "" for none. `offer`: what it would do about
    what has changed last; None until something has. `acts`: proposals were put to the vote last.
    """

    vote: Vote
    acts = True
    explains = ""
    offer: Offer | None = None

    def __init__(self, senders: int, log: DecisionLog[D]) -> None:
        self.senders, self.log = senders, log

    def start(self, vote: Vote) -> None:
        """Begin to plan for a `vote` that is about to begin."""
        self.vote = vote

    def begins(self, iteration: int, bundle: Bundle) -> None:
        """Take note that all ranks run `bundle` in `iteration`. On the training thread."""

    @abstractmethod
    def sender(self, report: R) -> int:
        """Return the number of a report's rank or worker among those that report."""

    @abstractmethod
    def observe(self, iteration: int, row: Mapping[int, R]) -> Proposed[D] | None:
        """Return a proposal after an `iteration` that all have reported; None to change nothing.

        `row`: the reports, by sender.
        """

    def observed(self, iteration: int, row: Mapping[int, R]) -> None:
        """Finish an `iteration`, whose proposal, if there was one, has been put to the vote."""

    def switched(self, decision: D, before: D | None) -> None:
        """Take note that a `decision` is in force, in place of the one `before` in this log."""

    def refused(self) -> None:
        """Take note that what was proposed last does not come into force."""

    @abstractmethod
    def back(self, why: str) -> Proposed[D] | None:
        """Return a proposal of what runs while nothing is slow; None where it is in force.

        `why`: the reason. Also None where its decision has figures that are not known yet.
        """

    @abstractmethod
    def held(self, decision: D) -> None:
        """Take note that the `decision` proposed last is only logged, and not to be repeated."""

    @abstractmethod
    def resume(self) -> None:
        """Propose from now on what was held, or gone back from, if it is still worth it."""

    def close(self) -> None:
        """Close the log: no iteration follows."""
        self.log.close()


M = TypeVar("M", bound=Remedy[Any, Any])


def _log(text: str) -> None:
    log_line(text)  # looked up at each call


class Loop(Generic[M]):
    """A loop gathers a row of reports per iteration, asks its remedy, and holds one open vote.

    It does so on a thread, so that training goes on meanwhile. No error leaves the thread: it costs
    a change, and is logged once.

    Args:
        remedy: see Remedy; called by the thread once `start` is called; an attribute, too.
        announce: takes a line for the log of the training when a decision is in force; None to log
            nothing; an attribute, too.
        acts: returns whether proposals are put to the vote now; while they are not, they are
            logged, and what runs goes back to the start.

    `seen`: the last iteration that all ranks have reported, and that is dealt with.
    """

    def __init__(
        self, remedy: M, *, announce: Callable[[str], None] | None = _log, acts: Acts = always
    ) -> None:
        self.remedy, self.announce = remedy, announce
        self._acts, self._off = acts, False
        self.seen = -1
        self._queue: queue.SimpleQueue[Report | Proposal | threading.Event | None]
        self._queue = queue.SimpleQueue()
        self._rows: dict[int, dict[int, Report]] = {}  # by iteration and sender
        self._pending: tuple[Proposal, Decision] | None = None

    @property
    def log(self) -> DecisionLog[Any]:
        """The remedy's log of decisions."""
        return self.remedy.log

    # Called by any thread.

    def start(self, vote: Vote) -> None:
        """Begin to plan for a `vote` that is about to begin."""
        self._vote = vote
        self.remedy.start(vote)
        self._thread = threading.Thread(target=self._plan, name="adaptra-planner", daemon=True)
        self._thread.start()

    def report(self, report: Report) -> None:
        """Take the `report` of one rank; it is dropped where too many wait."""
        if self._queue.qsize() < MOST_JOBS:
            self._queue.put(report)

    def closed(self, proposal: Proposal) -> None:
        """Take a `proposal` whose swap training has reached: in force, or never to be."""
        self._queue.put(proposal)

    def drain(self, timeout: float = 30.0) -> None:
        """Wait until all reports so far are dealt with, but no longer than `timeout` seconds."""
        done = threading.Event()
        self._queue.put(done)
        done.wait(timeout)

    def close(self) -> None:
        """End the thread, for which this waits `waits.CLOSE` at most, and the remedy."""
        self._queue.put(None)
        self._thread.join(waits.CLOSE)
        self.remedy.close()

    # On the thread.

    def _plan(self) -> None:
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

    def _take(self, report: Report) -> None:
        iteration, now = report.iteration, self._vote.iteration
        recent = range(now - RECENT_ITERATIONS, now + RECENT_ITERATIONS)
        sender = self.remedy.sender(report)
        if sender not in range(self.remedy.senders) or iteration not in recent:
            return  # late, or nonsense
        for late in [i for i in self._rows if i not in recent]:
            del self._rows[late]  # a rank does not report any more, or not all
        row = self._rows.setdefault(iteration, {})
        row[sender] = report
        if len(row) < self.remedy.senders:
            return
        del self._rows[iteration]
        row = dict(sorted(row.items()))
        proposed = self.remedy.observe(iteration, row)
        before, self._off = self._off, not self._acts()
        self.remedy.acts = not self._off
        if self._off:
            proposed = self._instead(iteration, proposed)
        elif before:
            self.remedy.resume()
        if proposed is not None:
            self._propose(iteration, proposed)
        self.remedy.observed(iteration, row)
        self.seen = iteration

    def _instead(self, iteration: int, proposed: Proposed[Any] | None) -> Proposed[Any] | None:
        """Return the proposal that goes to the vote while acting is off: the way back, if any.

        Without one a decision that is `proposed` is logged, as what would be done; what only
        prepares it, such as connections to be probed, is proposed.
        """
        decision = None if proposed is None else proposed.decision
        if decision is not None:
            self.remedy.held(decision)
        back = self.remedy.back(OFF) if self._vote.can_propose(iteration) else None
        if back is None and decision is not None:
            decision.number, decision.detected = self.log.made, iteration
            decision.iteration = self._vote.iteration + SWAP_LEAD
            self.log.add(decision, acting=False)
            self._describe(f"would be done, but {OFF}: {decision.sentence()}")
        return proposed if back is None and decision is None else back

    def _propose(self, iteration: int, proposed: Proposed[Any]) -> None:
        """Put to the vote what is `proposed` after the reports of `iteration`."""
        proposal = self._vote.propose(iteration, proposed.bundle)
        if (decision := proposed.decision) is None:
            return
        if proposal is None:
            self.remedy.refused()
            return
        decision.number, decision.detected = self.log.made, iteration
        decision.iteration = proposal.swap
        self._pending = proposal, decision
        self.log.add(decision)

    def _close(self, proposal: Proposal) -> None:
        self._vote.settle(proposal)
        closing, self._pending = self._pending, None
        if closing is None or closing[0] is not proposal:
            return
        decision, before = closing[1], self.log.last
        self.log.close_vote(decision, bool(proposal.committed), self.announce)
        if not proposal.committed:
            self.remedy.refused()
            return
        self.remedy.switched(decision, before)
        self._describe(decision.sentence())

    def _describe(self, sentence: str) -> None:
        """Log a decision's `sentence`, and after the first one what its words mean."""
        if self.announce is not None:
            self.announce(sentence)
            if self.remedy.explains:
                self._vote.note(self.remedy.explains)
