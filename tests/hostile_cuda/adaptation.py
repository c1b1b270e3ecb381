"""The replan loop over a device that keeps time: launches, kernels and a link of known seconds."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from fakes.hostile_cuda.driver import TIMED, Driver
from hostile_cuda.batches import TIMEOUT, prepare
from hostile_cuda.loops import ExecutorStage
from hostile_cuda.ranks import MemoryRendezvous
from hostile_cuda.stage_model import Host, label
from patience import PATIENCE
from runtime.leading import Watched, WatchedLoop, workers

from megatron_adaptra import waits
from megatron_adaptra.device.cuda import cuda_device
from megatron_adaptra.device.staging import Staging
from megatron_adaptra.ir.neighbours import Neighbours
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.routes import Routes
from megatron_adaptra.ir.schedule import Schedule, warmup_line
from megatron_adaptra.ir.unused_posts import first_posts
from megatron_adaptra.runtime.agreement import DecisionStore, starting_ballot
from megatron_adaptra.runtime.bundle import SCHEDULE
from megatron_adaptra.runtime.channel import Channel
from megatron_adaptra.runtime.controller import Controller, Member
from megatron_adaptra.runtime.decisions import DecisionLog
from megatron_adaptra.runtime.mailbox import Mailbox
from megatron_adaptra.runtime.replan_policy import ReplanPolicy
from megatron_adaptra.runtime.store import KeyValueStore
from megatron_adaptra.runtime.watchdog import Watchdog
from megatron_adaptra.telemetry.estimate import Estimator
from megatron_adaptra.telemetry.iteration_record import IterationRecord
from megatron_adaptra.telemetry.probe import Probe
from megatron_adaptra.transport.emulate import LinkEmulator
from megatron_adaptra.transport.engine.endpoint import Endpoint
from megatron_adaptra.transport.engine.on_device import DeviceTransport
from megatron_adaptra.transport.engine.transport import End, EngineTransport
from megatron_adaptra.transport.rules import parse_rules

STAGES, MICROBATCHES, WORDS = 2, 6, 64


@dataclass
class Course:
    """What a training is given: rules of its link, seconds of a kernel, and who launches them."""

    iterations: int
    rules: tuple[str, ...]
    kernel: float
    log: Path
    hosts: tuple[Host, ...]  # by stage


@dataclass
class Seen:
    """`warmup[i]`: in iteration i. `seconds`: of forwards, as reported. `delays`: to stage 1.

    `took`: seconds of each iteration's kernels, by the device, whatever the product has measured.
    """

    warmup: list[tuple[int, ...]] = field(default_factory=list)
    took: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def adapt(course: Course) -> Seen:
    """Two stages through the course; the last one's view."""
    prepare()
    waits.STORE = PATIENCE  # it answers, however little time this machine gives to its thread
    seen, rendezvous, store = Seen(), MemoryRendezvous(), dist.HashStore()
    done, reported = threading.Barrier(STAGES), [-1] * STAGES

    def rank(me: int) -> None:
        try:
            driver.enter(me, f"rank {me}")
            _Rank(driver, me, course, rendezvous, store, done, reported).run(seen)
        except Exception as error:
            seen.errors.append(f"rank {me}: {type(error).__name__}: {error}")
            done.abort()

    with Driver(STAGES, 8, 0, TIMED) as driver, driver.as_torch_cuda():
        threads = [Thread(target=rank, args=(me,), daemon=True) for me in range(STAGES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10 * TIMEOUT)
            assert not thread.is_alive(), driver.waits
        seen.findings = driver.findings
        for iteration in range(len(seen.warmup)):
            begun, _ = driver.span(label("F", iteration, 0, 0))
            _, ended = driver.span(label("W", iteration, MICROBATCHES - 1, 0))
            seen.took.append(ended - begun)
    return seen


class _Rank:
    def __init__(
        self,
        driver: Driver,
        me: int,
        course: Course,
        rendezvous: MemoryRendezvous,
        store: Any,
        done: threading.Barrier,
        reported: list[int],
    ) -> None:
        self.driver, self.me, self.course, self.done = driver, me, course, done
        self.reported = reported  # by rank, the last iteration
        self.endpoint = Endpoint(me, "127.0.0.1", "one", rendezvous, TIMEOUT, ports=())
        self.endpoint.connect([1 - me], TIMEOUT)
        self.device = cuda_device(torch.device("cuda", me))
        self.staging = Staging(self.device, self.endpoint.engine)
        ends = {1 - me: End(1 - me, f"stage {1 - me}")}
        rules = [rule for text in course.rules for rule in parse_rules(text, STAGES)]
        self.emulator = LinkEmulator(me, rules)
        self.transport = DeviceTransport(
            self.endpoint, "pipeline", ends, self.staging, me, self.emulator
        )
        self.control = EngineTransport(self.endpoint, "control", ends)
        self.probe = Probe(me, self.device)
        watchdog = Watchdog(me, range(STAGES))
        self.mailbox = Mailbox(
            Neighbours(me, Routes(STAGES)), self.transport, self.probe, watchdog, TIMEOUT
        )
        seconds, host = course.kernel, course.hosts[me]
        self.stage = ExecutorStage(driver, self.device, self.mailbox, 1, WORDS, seconds, host)
        order = tuple(warmup_line(STAGES - s, MICROBATCHES) for s in range(STAGES))
        start = Schedule(order, MICROBATCHES)
        channels = {1 - me: Channel(self.control, 1 - me)}
        ballot = starting_ballot(start, None, None, 0)
        decisions = DecisionStore(KeyValueStore("", lambda: store))
        self.controller: Controller
        if me == 0:
            hosts = ["one"] * STAGES
            estimator = Estimator(MICROBATCHES, hosts, None, 8 * WORDS, on_device=True)
            rule, log = ReplanPolicy(sends="eager"), DecisionLog(course.log)
            loop = WatchedLoop(start, estimator, rule, log, workers(len(hosts)))
            self.controller = Watched(ballot, channels, decisions, loop)
        else:
            self.controller = Member(ballot, channels, decisions, TIMEOUT, reports=True)
        self.unreported: deque[IterationRecord] = deque()

    def run(self, seen: Seen) -> None:
        try:
            for iteration in range(self.course.iterations):
                self._iterate(iteration, seen)
                self._keep_pace()
            self.mailbox.close()
            assert self.driver.synchronize() == 0
        finally:
            self.controller.close()
            self.done.wait(TIMEOUT)
            for one in (self.transport, self.control, self.staging, self.endpoint, self.device):
                one.close()

    def _keep_pace(self) -> None:
        """Until what both have reported is dealt with, however little time this machine gives to
        the threads that do it: the device's seconds are emulated, theirs are not."""
        self.done.wait(PATIENCE)
        if isinstance(self.controller, Watched):
            self.controller.wait_for(min(self.reported), votes=True)
        self.done.wait(PATIENCE)

    def _iterate(self, iteration: int, seen: Seen) -> None:
        self.emulator.iteration = iteration
        schedule = self.controller.begin(iteration)[SCHEDULE]
        program = lower(schedule)
        if self.me:
            seen.warmup.append(schedule.warmup)
        self.mailbox.begin(iteration, self.stage.new_message)
        self.probe.begin(iteration)
        for op in first_posts(program, self.me):
            self.mailbox.post(op)
        self.stage.run(program)
        self.mailbox.finish()
        self.unreported.append(self.probe.pipeline_ends())
        self.probe.iteration_ends()
        self.probe.read()
        while self.unreported and self.unreported[0].end:  # one iteration late
            record = self.unreported.popleft()
            self.controller.report(record)
            self.reported[self.me] = record.iteration
            if self.me:
                report = record.report()
                seen.seconds.append(report.wall.get("F", 0.0))
                seen.delays.append(report.delay[0])
                seen.unusable.append(record.unusable)
