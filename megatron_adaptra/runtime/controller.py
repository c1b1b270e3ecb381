"""The replan loop: stages report, the leader estimates and plans, all swap together.

One rank, a stage 0, leads (see leader.py). The members are the other stages of its pipeline, which
report, and ranks that have to run the same order because they meet these in collectives (tensor
parallel ones), which do not. Messages are received by one thread per channel; the training thread
only looks, at an iteration boundary, which plan is in force.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from megatron_adaptra.errors import AdaptraError, PeerLost
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.runtime.agreement import Ballot, unpack
from megatron_adaptra.runtime.channel import Channel
from megatron_adaptra.telemetry.probe import IterationRecord

_FOREVER = 7 * 86400.0  # seconds a control thread waits for the next message
_GOODBYE = 10.0  # seconds that `close` waits for each control thread, hence for the other side


class Controller(ABC):
    """One rank's part in the loop: a Leader or a Member.

    `ballot`: with the schedule to start with (`starting_ballot`). `channels`: by index of the rank
    at the other end. `status` is what charts of the training show, as the leader last sent it;
    empty on all ranks but the leader and its watcher.
    """

    def __init__(self, ballot: Ballot, channels: Mapping[int, Channel]) -> None:
        self.ballot = ballot
        self.status: dict[str, Any] = {}
        self._channels = dict(channels)
        self._last: IterationRecord | None = None
        self._threads = [
            threading.Thread(
                target=self._listen, args=(c,), name=f"adaptra-control-{p}", daemon=True
            )
            for p, c in self._channels.items()
        ]

    @abstractmethod
    def begin(self, iteration: int) -> Schedule:
        """Called by the training thread at the boundary before `iteration`: the schedule to run.

        The leader never waits. Raises Disagreement on a member, see there.
        """

    @abstractmethod
    def report(self, record: IterationRecord) -> None:
        """Called by the training thread when the pipeline part of an iteration is over."""

    def close(self) -> None:
        """End the control threads; returns after ten seconds each if the other side is lost."""
        for thread in self._threads:
            thread.join(_GOODBYE)

    @abstractmethod
    def _on_message(self, channel: Channel, message: dict[str, Any]) -> bool:
        """On a control thread; False after the last message."""

    @abstractmethod
    def _on_loss(self) -> None:
        """A channel is broken: on its control thread, which ends."""

    def _start_listening(self) -> None:
        """The end of a subclass's `__init__`: messages may come from now on."""
        for thread in self._threads:
            thread.start()

    def _listen(self, channel: Channel) -> None:
        """The control thread of one channel."""
        try:
            while self._on_message(channel, channel.receive(_FOREVER)):
                pass
        except PeerLost:
            self._on_loss()

    def _report_of(self, record: IterationRecord) -> dict[str, Any]:
        """The message, with the step and the whole of the iteration before.

        `record` itself has not ended when it is reported.
        """
        last, self._last = self._last, record
        ended = last is not None and last.end > 0
        return {
            "kind": "report",
            **record.report(),
            "step": last.step if last and ended else None,
            "seconds": last.end - last.begin if last and ended else None,
        }


class Member(Controller):
    """Runs the leader's plans. `channels`: that to the leader alone, rank 0 of the group.

    `ballot`: see Controller. `timeout`: seconds that `begin` waits for the leader's decision on a
    plan that this rank has acknowledged; then Disagreement names the plan. `reports`: whether this
    rank is of the leader's own pipeline.
    """

    def __init__(
        self,
        ballot: Ballot,
        channels: Mapping[int, Channel],
        timeout: float,
        reports: bool = True,
    ) -> None:
        super().__init__(ballot, channels)
        self._timeout, self._reports = timeout, reports
        self._start_listening()

    def begin(self, iteration: int) -> Schedule:
        """As for Controller, at `iteration`; may wait for the leader's decision."""
        self.ballot.at_boundary(iteration, self._timeout, leads=False)
        return self.ballot.schedule

    def report(self, record: IterationRecord) -> None:
        """Send it to the leader. Raises PeerLost as Channel.send does."""
        if self._reports:
            self._channels[0].send(self._report_of(record))

    def _on_message(self, channel: Channel, message: dict[str, Any]) -> bool:
        if message["kind"] == "propose":
            channel.send(self._answer(message))
        elif message["kind"] == "verdict":
            self.ballot.decide(message["number"], message["commit"])
        elif message["kind"] == "status":
            self.status = message["status"]
        elif message["kind"] == "bye":
            channel.send({"kind": "bye"})
            channel.flush()
            return False
        return True

    def _on_loss(self) -> None:
        self.ballot.lose_leader()

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """To a proposal; one that cannot run here is refused."""
        schedule = self.ballot.schedule
        try:
            proposal = unpack(message, schedule.stages, schedule.microbatches)
            ok = self.ballot.offer(proposal)
        except AdaptraError:
            ok = False
        return {"kind": "ack", "number": message["number"], "ok": ok}
