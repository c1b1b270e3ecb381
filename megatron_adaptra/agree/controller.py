"""The replan loop: stages report, the leader estimates and plans, all swap together.

One rank, a stage 0, leads (see leader.py). The members are the other stages of its pipeline, which
report, and ranks that have to run the same order because they meet these in collectives (tensor
parallel ones), which do not.

Messages are received by one thread per channel; another one sends what the training thread hands
it, and a heartbeat, so that no connection is ever idle; a connection that is lost is opened again.
The training thread only looks, at an iteration boundary, which plan is in force. Nothing that fails
here ends the training: it costs new plans, and is logged once.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from megatron_adaptra.agree.agreement import Ballot, DecisionStore, Proposal, unpack
from megatron_adaptra.agree.bundle import Bundle
from megatron_adaptra.agree.channel import ANY_RUN, Channel
from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import AdaptraError, BadMessage, PeerLost
from megatron_adaptra.base.exits import wait_at_exit
from megatron_adaptra.base.log import GOES_ON, LogOnce
from megatron_adaptra.measure.iteration_record import IterationRecord
from megatron_adaptra.measure.reduction_report import ReductionReport
from megatron_adaptra.measure.report import StageReport

Check = type | tuple[type, ...]
_NUMBER = (int, float)
Report = StageReport | ReductionReport

# The kinds of messages that carry reports, with the class of each report.
REPORTS: Mapping[str, type[Report]] = {"report": StageReport, "reduction": ReductionReport}
# Every message has its `run`, too, named by the first iteration. `alive` and `lost` are about the
# connection alone: it works, and one direction of it does not.
KINDS: Mapping[str, Mapping[str, Check]] = {
    "alive": {},
    "lost": {},
    "bye": {},
    "propose": {"number": int, "swap": int, "bundle": str, "digest": str, "key": str},
    "ack": {"number": int, "digest": str},
    "decision": {"number": int, "commit": bool},
    "status": {"status": dict},
    **{kind: {"report": dict} for kind in REPORTS},
}
STATUS: Mapping[str, Check] = {
    "iteration": int, "delays": dict, "alarms": list, "replans": int, "predicted": _NUMBER,
    "lower_bound": _NUMBER,
}  # fmt: skip
MOST_JOBS = 256  # that wait to be done: reports beyond that are dropped


class Controller(ABC):
    """A controller plays one rank's part in the loop, as a Leader or a Member.

    Args:
        ballot: holds the schedule to start with (`starting_ballot`).
        channels: to the ranks this one exchanges messages with, by their index in the plan group:
            all members on the leader, the leader on a member. They outlive the controller.
        store: where the leader writes decisions for members whose connection is lost.
        first: the first iteration of this run; messages of other runs are ignored.
        prepare: is called with a proposal before this rank agrees to it, on a control thread; an
            AdaptraError of its is a refusal.

    `status` is what charts of the training show, as the leader last sent it; empty on all ranks but
    the leader and its watcher. `refused`: how many messages could not be used.
    """

    def __init__(
        self,
        ballot: Ballot,
        channels: Mapping[int, Channel],
        store: DecisionStore,
        first: int,
        prepare: Callable[[Proposal], None] | None = None,
    ) -> None:
        self.ballot, self.first = ballot, first
        self._prepare = prepare
        self.status: dict[str, Any] = {}
        self.refused = 0
        self._channels, self._store = dict(channels), store
        self._last: IterationRecord | None = None
        self._once = LogOnce()
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._leaving = threading.Event()  # nobody opens a connection again
        self._ending = threading.Event()  # nobody waits for messages any more
        self._threads = [threading.Thread(target=self._work, name="adaptra-control", daemon=True)]
        self._threads += [
            threading.Thread(
                target=self._listen, args=(c,), name=f"adaptra-control-{p}", daemon=True
            )
            for p, c in self._channels.items()
        ]

    @abstractmethod
    def begin(self, iteration: int) -> Bundle:
        """Begin `iteration` on the training thread, at its boundary; return the bundle in force.

        The leader never waits. A member waits for the leader's decision if the plan that it has
        acknowledged would come into force now; Disagreement if none comes.
        """

    def report(self, record: IterationRecord) -> None:
        """Report an iteration, on the training thread, when its pipeline part is over.

        Never waits and never raises: a report that cannot be made or sent is dropped.
        """
        try:
            before, self._last = self._last, record
            self._report(record.report(before))
        except Exception as error:
            self._say("an iteration cannot be reported", error)

    def hand_in(self, report: Report) -> None:
        """Pass on a finished `report`: of a reduction, or of a whole replica. Never raises."""
        try:
            self._report(report)
        except Exception as error:
            self._say("an iteration cannot be reported", error)

    def close(self) -> None:
        """End the control threads.

        Waits `waits.CLOSE` seconds at most for the thread that sends, and the same for all those
        that receive: they end with the last message of the other side.
        """
        worker, *listeners = self._threads
        self._leaving.set()
        self._jobs.put(None)
        worker.join(waits.CLOSE)
        self._take_leave()
        end = time.monotonic() + waits.CLOSE
        for thread in listeners:
            thread.join(max(0.0, end - time.monotonic()))
        self._ending.set()
        for thread in listeners:
            thread.join(2 * waits.POLL)

    @abstractmethod
    def _report(self, report: Report) -> None:
        """Pass this rank's own report on. On the training thread."""

    @abstractmethod
    def _on_message(self, channel: Channel, message: dict[str, Any]) -> bool:
        """Handle a message on a control thread; return False after the last one."""

    def _take_leave(self) -> None:  # noqa: B027  # a member has nothing to do
        """Ask the other side to end, too, if that is this rank's part."""

    def _start_threads(self) -> None:
        """Start the threads, at the end of a subclass's `__init__`: messages may come from now on.

        Where not all threads can be started, those that run end.
        """
        try:
            for thread in self._threads:
                wait_at_exit(thread)
                thread.start()
        except BaseException:
            self._leaving.set()
            self._ending.set()
            self._jobs.put(None)
            raise

    def _send(self, channel: Channel, message: dict[str, Any]) -> bool:
        """Send a message of this run, if the channel takes it now."""
        return channel.send({**message, "run": self.first})

    def _say(self, what: str, error: object = None) -> None:
        """Log once that something has failed, and how it did the first time.

        Nothing after the end: a thread that is late may find gone what it needs.
        """
        if self._ending.is_set():
            return
        how = "" if error is None else f" ({type(error).__name__}: {str(error)[:200]})"
        self._once.line(what, f"{how}; {GOES_ON} with the plan in force")

    # On the threads of the channels.

    def _listen(self, channel: Channel) -> None:
        try:
            while not self._ending.is_set():
                try:
                    message = channel.receive(waits.POLL)
                    if message is not None and not self._take(channel, checked(message)):
                        return
                except BadMessage as error:
                    self._refuse(channel, error)
                except PeerLost as error:
                    self._lose(channel, error)
                    if not channel.reopen(self._leaving):
                        return
                    self._once.line(f"messages of member {channel.peer} arrive again")
        except Exception as error:
            self._lose(channel, error)

    def _take(self, channel: Channel, message: dict[str, Any]) -> bool:
        """Act on a message; return False after the last one."""
        if message["kind"] == "lost":
            raise PeerLost("what was sent there does not arrive")
        if message["kind"] == "alive" or message["run"] != self.first:
            return True  # it says that the connection is there, or is of a run that is over
        try:
            return self._on_message(channel, message)
        except Exception as error:  # of a kind and of types that are right, yet not to be used
            self._refuse(channel, error)
            return True

    def _refuse(self, channel: Channel, error: Exception) -> None:
        self.refused += 1
        self._say(
            f"a message of member {channel.peer} is ignored, as all that make no sense", error
        )

    def _lose(self, channel: Channel, error: Exception) -> None:
        channel.lost = channel.lost or str(error)
        when = "while" if channel.renews else "any more:"
        self._say(f"no plan is changed {when} no message of member {channel.peer} arrives", error)

    # On the thread that sends.

    def _work(self) -> None:
        beat = time.monotonic() + waits.HEARTBEAT
        while True:
            try:
                if (left := beat - time.monotonic()) > 0:
                    if (job := self._jobs.get(timeout=left)) is None:
                        return
                    job()
                    continue
                beat = time.monotonic() + waits.HEARTBEAT
                self._beat()
            except queue.Empty:
                pass
            except Exception as error:
                self._say("a control message cannot be sent", error)

    def _beat(self) -> None:
        """Send a heartbeat over each connection, and notice those that are silent."""
        for channel in self._channels.values():
            channel.send({"kind": "alive", "run": ANY_RUN})
            silent = time.monotonic() - channel.last_frame
            if silent > waits.QUIET and not channel.lost:
                if channel.renews:  # a connection whose packets a firewall drops looks like this
                    channel.lost = f"silent for {silent:.3g} s"
                else:
                    self._say(f"no plan is changed while member {channel.peer} is silent")


class Member(Controller):
    """A member runs the plans that the leader proposes.

    Args:
        ballot, store, first, prepare: see Controller.
        channels: to the leader alone, by its index in the plan group: 0.
        timeout: seconds that `begin` waits for the leader's decision on a plan that this rank has
            acknowledged; then Disagreement names the plan.
        reports: whether this rank is of the leader's own pipeline, and sends it what it measures.
    """

    def __init__(
        self,
        ballot: Ballot,
        channels: Mapping[int, Channel],
        store: DecisionStore,
        timeout: float,
        *,
        first: int = 0,
        reports: bool = True,
        prepare: Callable[[Proposal], None] | None = None,
    ) -> None:
        super().__init__(ballot, channels, store, first, prepare)
        self._timeout, self._reports = timeout, reports
        self._start_threads()

    def begin(self, iteration: int) -> Bundle:
        self.ballot.at_boundary(iteration, self._timeout, leads=False, look_up=self._look_up_later)
        return self.ballot.in_force

    def _report(self, report: Report) -> None:
        if self._reports and self._jobs.qsize() < MOST_JOBS:
            self._jobs.put(lambda: self._send(self._channels[0], message_of(report)))

    def _on_message(self, channel: Channel, message: dict[str, Any]) -> bool:
        if message["kind"] == "propose":
            digest = self._accepted(message)
            self._send(channel, {"kind": "ack", "number": message["number"], "digest": digest})
        elif message["kind"] == "decision":
            self.ballot.decide(message["number"], message["commit"])
        elif message["kind"] == "status":
            self.status = message["status"]
        elif message["kind"] == "bye":
            self._send(channel, {"kind": "bye"})
            channel.flush()
            return False
        return True

    def _accepted(self, message: dict[str, Any]) -> str:
        """Return the digest of a proposal that can come into force here; empty where it cannot.

        It can if its decision will be known here in any case.
        """
        try:
            proposal = unpack(message, self.ballot.in_force)
            if self._prepare is not None:
                self._prepare(proposal)
        except AdaptraError as error:
            self._say("a proposal is refused", error)
            return ""
        accepted = self._store.reaches(proposal) and self.ballot.offer(proposal)
        return proposal.bundle.digest if accepted else ""

    def _look_up_later(self, proposal: Proposal) -> None:
        self._jobs.put(lambda: self._look_up(proposal))

    def _look_up(self, proposal: Proposal) -> None:
        """Look for a decision in the store, too, until it is there, as training waits for it."""
        end, pause = time.monotonic() + self._timeout, waits.LOOK_UP
        while not self.ballot.await_decision(proposal, pause) and time.monotonic() < end:
            if (commit := self._store.decision(proposal)) is not None:
                self.ballot.decide(proposal.number, commit)
            pause = min(2 * pause, waits.POLL)


def checked(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `message` if all fields are there and of their types; else raise BadMessage.

    The `report` of one of REPORTS is an object of that class from here on.
    """
    kind = message.get("kind")
    fields = KINDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise BadMessage(f"a message of kind {str(kind)[:40]!r}; there are {', '.join(KINDS)}")
    for name, types in {"run": int, **fields}.items():
        if not _is(message.get(name), types):
            raise BadMessage(
                f"a message of kind {kind!r} with {name} {str(message.get(name))[:40]!r}"
            )
    status = message["status"] if kind == "status" else {}
    for name, value in status.items():
        if name not in STATUS or not _is(value, STATUS[name]):
            raise BadMessage(f"a status with {str(name)[:40]!r} {str(value)[:40]!r}")
    if not all(_is(seconds, _NUMBER) for seconds in status.get("delays", {}).values()):
        raise BadMessage("a status with delays that are no numbers")
    if not all(_is(link, str) for link in status.get("alarms", [])):
        raise BadMessage("a status with alarms that are no links")
    if isinstance(kind, str) and kind in REPORTS:
        return {**message, "report": REPORTS[kind].from_json(message["report"])}
    return dict(message)


def message_of(report: Report) -> dict[str, Any]:
    """Make the message that carries a `report`."""
    kind = next(kind for kind, cls in REPORTS.items() if type(report) is cls)
    return {"kind": kind, "report": report.to_json()}


def _is(value: object, types: Check) -> bool:
    """Return whether `value` is of one of `types`; True and False do not count as numbers."""
    return type(value) in (types if isinstance(types, tuple) else (types,))
