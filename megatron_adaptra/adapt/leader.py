"""The leader's side of the vote: it proposes bundles, counts answers, and passes decisions on."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from typing import Any

from megatron_adaptra.adapt.loop import SWAP_LEAD, Loop, Vote
from megatron_adaptra.agree.agreement import (
    LONGEST_SWAP_LEAD,
    SLOTS,
    Ballot,
    DecisionStore,
    Proposal,
    pack,
)
from megatron_adaptra.agree.bundle import Bundle
from megatron_adaptra.agree.channel import Channel
from megatron_adaptra.agree.controller import REPORTS, Controller, Report
from megatron_adaptra.base.errors import AdaptraError


class Leader(Controller, Vote):
    """A leader proposes bundles that a loop plans from the reports of all stages.

    Args:
        ballot, channels, store, first, prepare: see Controller; the loop's thread prepares.
        loop: gets the reports, and puts its proposals to the vote here; started and closed by the
            leader.
        watcher: the index of the member that shows the status in charts; None for none.
    """

    def __init__(
        self,
        ballot: Ballot,
        channels: Mapping[int, Channel],
        store: DecisionStore,
        loop: Loop[Any],
        *,
        first: int = 0,
        watcher: int | None = None,
        prepare: Callable[[Proposal], None] | None = None,
    ) -> None:
        super().__init__(ballot, channels, store, first, prepare)
        self.loop = loop
        self._watcher = watcher
        self._token = f"decision/{secrets.token_hex(8)}"  # no other leader's decisions are ours
        self._proposed = 0
        self._not_before = 0  # the iteration from which on the store is tried again
        self._open: Proposal | None = None  # only the loop's thread looks at it
        self._swap_lead = SWAP_LEAD  # doubled after a proposal that was aborted
        self._in_turn = threading.Lock()  # a proposal is sent before its decision
        loop.start(self)
        self._start_threads()

    # Called by the training thread.

    def begin(self, iteration: int) -> Bundle:
        closed = self.ballot.at_boundary(iteration, 0.0, leads=True)
        if closed is not None:
            if not closed.committed:
                self._pass_on(closed)
            self.loop.closed(closed)
        self.loop.remedy.begins(iteration, self.ballot.in_force)
        return self.ballot.in_force

    def close(self) -> None:
        """End this run's plans: all members leave, and the log has the last outcome.

        Waits `waits.CLOSE` at most for the members, and the same for each of its own threads.
        """
        super().close()
        self.loop.close()

    def _take_leave(self) -> None:
        self._send_all({"kind": "bye"})

    def _report(self, report: Report) -> None:
        self.loop.report(report)

    # Called by the loop's thread.

    def note(self, text: str, about: str = "") -> None:
        self._once.line(text, write=self.loop.announce, about=about)

    @property
    def in_force(self) -> Bundle:
        return self.ballot.in_force

    @property
    def iteration(self) -> int:
        """The last iteration that has begun here; before the first one begins, the one before it.

        Members may begin the first iteration, and report it, before this rank does.
        """
        return max(self.ballot.iteration, self.first - 1)

    def can_propose(self, iteration: int) -> bool:
        asked = not any(channel.lost for channel in self._channels.values())
        free = self._open is None and not self.ballot.opening
        return free and asked and iteration >= self._not_before

    def propose(self, iteration: int, bundle: Bundle) -> Proposal | None:
        number = self._proposed
        self._proposed += 1
        key = f"{self._token}/{number % SLOTS}"  # keys are reused
        proposal = Proposal(number, 0, bundle, key)
        if not self._store.write(proposal):
            self._say("a new plan cannot be agreed on: torch's key-value store does not answer")
            self._not_before = iteration + LONGEST_SWAP_LEAD
            return None
        proposal.swap = self.iteration + self._swap_lead
        with self._in_turn:
            if not self.ballot.offer(proposal):
                return None
            self._jobs.put(lambda: self._send_proposal(proposal))
        self._open = proposal
        if self._prepare is not None:  # while the members do
            digest = bundle.digest
            try:
                self._prepare(proposal)
            except AdaptraError as error:
                self._say("this rank cannot run what it has proposed", error)
                digest = ""
            self._answer(proposal.number, 0, digest)
        return proposal

    def settle(self, proposal: Proposal) -> None:
        self._store.write(proposal)  # on another thread than the one that sends it to members
        self._open = None
        # Not committed: members needed more time for their answers.
        later = min(2 * self._swap_lead, LONGEST_SWAP_LEAD)
        self._swap_lead = SWAP_LEAD if proposal.committed else later

    def publish(self, status: dict[str, Any]) -> None:
        self.status = status
        if self._watcher is not None:
            self._send(self._channels[self._watcher], {"kind": "status", "status": status})

    failed = Controller._say

    # On the control threads.

    def _on_message(self, channel: Channel, message: dict[str, Any]) -> bool:
        if message["kind"] in REPORTS:
            self._report(message["report"])
        elif message["kind"] == "ack":
            self._answer(message["number"], channel.peer, message["digest"])
        return bool(message["kind"] != "bye")

    def _answer(self, number: int, member: int, digest: str) -> None:
        """Count a member's answer to a proposal, or the leader's own where it had to prepare."""
        voters = len(self._channels) + (self._prepare is not None)
        decided = self.ballot.acknowledge(number, member, digest, voters)
        if decided is not None:
            self._pass_on(decided)
            if digest and not decided.committed:
                self._once.line(f"member {member} reads another plan than was proposed")

    def _pass_on(self, proposal: Proposal) -> None:
        """Send a decision, soon and after its proposal."""
        number, commit = proposal.number, bool(proposal.committed)
        message = {"kind": "decision", "number": number, "commit": commit}
        with self._in_turn:
            self._jobs.put(lambda: self._send_all(message))

    def _send_proposal(self, proposal: Proposal) -> None:
        if not self._send_all(pack(proposal)):
            self.ballot.decide(proposal.number, False)

    def _send_all(self, message: dict[str, Any]) -> bool:
        """Send a `message` to all members; return whether each channel takes it."""
        taken = [self._send(channel, message) for channel in self._channels.values()]
        return all(taken)


def planner_of(controller: object) -> Any:
    """Return the remedy that plans for the ranks of a `controller`; None but at their leader."""
    return controller.loop.remedy if isinstance(controller, Leader) else None
