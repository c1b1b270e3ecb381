"""Control that is lost, idle, or full of nonsense costs new plans, and never the training."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist
from agree.leading import Watched, WatchedLoop, drive, warmups, workers
from agree.pipeline import schedule
from measure.records import record
from patience import PATIENCE
from transport.ranks import Processes, RankFixture, until

from megatron_adaptra.adapt.log import DecisionLog
from megatron_adaptra.adapt.schedules.decisions import PlanDecision
from megatron_adaptra.adapt.schedules.policy import ReplanPolicy
from megatron_adaptra.agree.agreement import DecisionStore, starting_ballot
from megatron_adaptra.agree.bundle import SCHEDULE
from megatron_adaptra.agree.channel import Channel
from megatron_adaptra.agree.controller import Member
from megatron_adaptra.agree.relink import Relink
from megatron_adaptra.agree.store import KeyValueStore
from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import PeerLost
from megatron_adaptra.measure.estimate import Estimator
from megatron_adaptra.transport.connect import new_devices
from megatron_adaptra.transport.gloo import GlooTransport

SLOW = {(1, 2): 0.04, (2, 1): 0.04}
STOCK = (3, 2, 1)


class Cut(Channel):
    """The member's end of a connection that is lost at the first message of a kind, which is lost,
    too.

    The other end comes to know it.
    """

    at = ""

    def send(self, message: dict[str, Any]) -> bool:
        if message["kind"] == self.at:
            self.cut()
        return super().send(message)

    def receive(self, timeout: float) -> dict[str, Any] | None:
        message = super().receive(timeout)
        if message is not None and message["kind"] == self.at:
            self.cut()
            raise PeerLost(self.lost)
        return message

    def cut(self) -> None:
        super().send({"kind": "lost", "run": 0})
        self.lost = "cut by the test"


@pytest.mark.parametrize("at", ["report", "propose", "ack", "decision"])
def test_a_connection_that_is_cut_at_any_moment_splits_and_ends_nobody(
    at: str, tmp_path: Any, hasty: None, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Of stage 2, or of a rank beyond the pipeline, at its first message of a kind."""
    monkeypatch.setattr(waits, "STORE", PATIENCE)  # it answers
    cut = type("CutHere", (Cut,), {"at": at})
    reports = at == "report"  # then no iteration is known to the leader as a whole
    run = drive(
        tmp_path / "d", lambda i: SLOW if i >= 6 else {}, 24, followers=1, paced=not reports,
        channels={2 if reports else 3: cut},
    )  # fmt: skip
    for ran in run.ran:
        assert ran == run.ran[0]
    assert len(warmups(run.ran[0])) == (2 if at == "decision" else 1)
    printed = [line for line in capfd.readouterr().err.splitlines() if "no message of" in line]
    assert len(printed) == 2 or (reports and printed)  # by each end
    assert all("training goes on with the plan in force" in line for line in printed)


class Broken:
    """A store that answers no more from a moment on: it hangs, or says that it is gone."""

    def __init__(self, hangs: bool) -> None:
        self.alive, self._hangs, self._store = True, hangs, dist.HashStore()
        self.asked, self.over = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        def asked(*args: Any) -> Any:
            if not self.alive:
                self.asked.set()
                assert not self._hangs or self.over.wait(PATIENCE)
                raise RuntimeError("Broken pipe")
            return getattr(self._store, name)(*args)

        return asked


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes are tenths of seconds, and days are seconds."""
    shorten(monkeypatch.setattr)


def shorten(set_to: Any) -> None:
    for name, seconds in {
        "HEARTBEAT": 0.05, "POLL": 0.05, "STORE": 0.1, "LOOK_UP": 0.01,
        "CLOSE": 2.0, "FOREVER": 1.0,
    }.items():  # fmt: skip
        set_to(waits, name, seconds)


@pytest.mark.parametrize("hangs", [True, False])
def test_without_torchs_store_no_plan_comes_in_and_training_goes_on(
    hangs: bool, tmp_path: Any, hasty: None, capfd: pytest.CaptureFixture[str]
) -> None:
    store = Broken(hangs)
    store.alive = False
    run = drive(tmp_path / "d", lambda i: SLOW if i >= 6 else {}, 30, store=store, paced=True)
    store.over.set()
    assert {one.warmup for ran in run.ran for one in ran} == {STOCK}
    printed = [line for line in capfd.readouterr().err.splitlines() if "key-value store" in line]
    assert len(printed) == 1


def test_a_store_that_ends_with_the_training_is_no_news(
    tmp_path: Any, hasty: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The leader waits for it in the middle of a proposal, and nobody waits for the leader."""
    monkeypatch.setattr(waits, "STORE", PATIENCE)
    monkeypatch.setattr(waits, "CLOSE", 0.1)
    store = Broken(hangs=True)
    store.alive = False

    def at(_: int, iteration: int) -> None:
        assert iteration < 29 or store.asked.wait(PATIENCE), "nothing is proposed"

    run = drive(tmp_path / "d", lambda i: SLOW if i >= 6 else {}, 30, store=store, at=at)
    store.over.set()
    run.leader.loop._thread.join(PATIENCE)
    assert not run.leader.loop._thread.is_alive()
    assert "key-value store" not in capfd.readouterr().err


def test_a_store_that_dies_during_the_vote_does_not_matter_where_connections_are_whole(
    tmp_path: Any, hasty: None
) -> None:
    store = Broken(hangs=True)

    class Kills(Channel):
        def send(self, message: dict[str, Any]) -> bool:
            if message["kind"] == "ack" and message["digest"]:
                store.alive = False
            return super().send(message)

    run = drive(
        tmp_path / "d", lambda i: SLOW if i >= 6 else {}, 24, store=store, paced=True,
        channels={1: Kills, 2: Kills},
    )  # fmt: skip
    store.over.set()
    for ran in run.ran:
        assert ran == run.ran[0]


def trains(me: RankFixture, what: str) -> Any:
    """A leader and a member over gloo. Before a link gets slow, `what` happens to their
    connections.

    The depth of stage 0's warmup in each iteration, and what was printed.
    """
    shorten(setattr)
    waits.STORE, waits.FOREVER = PATIENCE, 3.0  # here the store answers; a busy rank is silent
    if what == "silence":
        waits.QUIET = 1.0
    stderr = os.memfd_create("stderr")
    os.dup2(stderr, 2)
    before = sockets()  # of the store, and of the other connections
    peer, transport = 1 - me.rank, me.open("control")
    assert isinstance(transport, GlooTransport)
    relink = Relink(transport, (0, 1), peer, "control", new_devices())
    channel = CountedChannel(transport, peer, None if what == "cut for good" else relink)
    decisions = DecisionStore(KeyValueStore("adaptra/"))
    ballot = starting_ballot(schedule((2, 1), 8))
    controller: Watched | Member
    if me.rank == 0:
        estimator = Estimator(8, ["one"] * 2, None, 1000)
        log = DecisionLog(PlanDecision, None)
        loop = WatchedLoop(schedule((2, 1), 8), estimator, ReplanPolicy(), log, workers(2))
        controller = Watched(ballot, {1: channel}, decisions, loop)
    else:
        controller = Member(ballot, {0: channel}, decisions, PATIENCE)
    ran = []
    for iteration in range(24):
        ran.append(controller.begin(iteration)[SCHEDULE].warmup[0])
        if iteration == 8:
            me.meet()
            happens(what, me, channel, before)
            me.meet()
        delay = 0.04 if iteration >= 10 else 1e-4
        controller.report(record(me.rank, iteration, {1 - me.rank: delay}, count=8))
        if isinstance(controller, Watched) and not channel.lost:
            controller.wait_for(iteration, votes=True)
        me.meet()
    controller.close()
    return ran, os.pread(stderr, 10_000, 0).decode()


class CountedChannel(Channel):
    """Counts how often it is whole again; `mute`: what is sent is lost without a word."""

    mute, times = False, 0

    def send(self, message: dict[str, Any]) -> bool:
        return self.mute or super().send(message)

    def reopen(self, over: threading.Event) -> bool:
        self.mute = False
        whole = super().reopen(over)
        self.times += whole
        return whole


def happens(what: str, me: RankFixture, channel: CountedChannel, others: set[int]) -> None:
    if what == "a quiet week":
        last = time.monotonic() + 3 * waits.FOREVER
        until(lambda: min(channel.last_frame, time.monotonic()) > last, "the other side beats")
    elif what == "silence":
        channel.mute = True
        until(lambda: channel.times > 0, "the connection is whole again")
    elif what.startswith("cut"):
        for _ in range(2 if what == "cut twice" else 1):
            times = channel.times
            me.meet()
            if me.rank == 0:
                cut(sockets() - others)
            until(lambda n=times: bool(channel.lost) or channel.times > n, "the cut is noticed")
            if what != "cut for good":
                until(lambda n=times: channel.times > n, "the connection is whole again")


def cut(connections: set[int]) -> None:
    for number in connections:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
            if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                one.shutdown(socket.SHUT_RDWR)


def sockets() -> set[int]:
    """The descriptors of this process that are sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found.add(int(name))
    return found


@pytest.mark.long
def test_a_quiet_week_ends_no_connection() -> None:
    with Processes(trains, "a quiet week") as processes:
        (leads, printed), (follows, printed_by_member) = processes.result(0), processes.result(1)
    assert leads == follows
    assert leads[0] == 2 < leads[-1]
    assert printed == printed_by_member == ""


def test_a_connection_that_cannot_be_made_anew_costs_new_plans_alone() -> None:
    with Processes(trains, "cut for good") as processes:
        (leads, printed), (follows, printed_by_member) = processes.result(0), processes.result(1)
    assert leads == follows == [2] * 24
    for text in (printed, printed_by_member):
        assert "no plan is changed any more: no message of member" in text
        assert text.count("training goes on with the plan in force") == 1


@pytest.mark.parametrize("what", ["cut twice", "silence"])
def test_a_connection_that_is_lost_is_made_anew(what: str) -> None:
    with Processes(trains, what) as processes:
        (leads, printed), (follows, printed_by_member) = processes.result(0), processes.result(1)
    assert leads == follows
    assert leads[0] == 2 < leads[-1]
    for text in (printed, printed_by_member):
        # Once, however often; torch has words of its own.
        lost, whole = (line for line in text.splitlines() if line.startswith("adaptra: "))
        assert lost.startswith("adaptra: no plan is changed while no message of member ")
        assert whole.endswith(" arrive again")
