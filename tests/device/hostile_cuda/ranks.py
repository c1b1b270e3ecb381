"""Ranks as threads of one process: each with its own device, engine, transport and mailbox."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from dataclasses import dataclass, field
from enum import Enum
from threading import Thread

import torch
from fakes.hostile_cuda.driver import Driver
from hostile_cuda.abandoned import give_up
from hostile_cuda.collectives import Collectives, WaitsReported
from hostile_cuda.jobs import NATIVE, Job
from hostile_cuda.loops import ExecutorStage, NativeStage
from hostile_cuda.stage_model import reference
from hostile_cuda.times import known, moments, times
from patience import PATIENCE

from megatron_adaptra.device.cuda import cuda_device
from megatron_adaptra.device.host import HostDevice
from megatron_adaptra.device.staging import Staging
from megatron_adaptra.emulate.links import LinkEmulator
from megatron_adaptra.execute.mailbox import Mailbox
from megatron_adaptra.execute.watchdog import Watchdog
from megatron_adaptra.ir.program import Neighbours, first_posts
from megatron_adaptra.ir.routes import Routes
from megatron_adaptra.measure.iteration_record import IterationRecord
from megatron_adaptra.measure.probe import Probe
from megatron_adaptra.transport.engine.endpoint import Endpoint
from megatron_adaptra.transport.engine.on_device import DeviceTransport
from megatron_adaptra.transport.engine.transport import End


class MemoryRendezvous:
    """Where the endpoints of one process read each other's addresses."""

    def __init__(self) -> None:
        self._words: dict[str, str] = {}

    def put(self, key: str, text: str) -> None:
        self._words[key] = text

    def put_first(self, key: str, text: str) -> None:
        self._words.setdefault(key, text)

    def get(self, key: str) -> str | None:
        return self._words.get(key)


@dataclass
class Outcome:
    """`wrong`: positions whose results are not the reference's. `left`: what was not given back."""

    job: Job
    findings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    calls: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def faults(self) -> list[str]:
        wrong = [f"results of position {p} are not the reference's" for p in self.wrong]
        return [*self.findings, *self.errors, *wrong, *self.left]


class Plant(Enum):
    """A fault in a job, below the product or beside it.

    NO_WAITS: no stream waits for an event. ALL_OVER: each event has passed at once.
    LAUNCH_TIMES: moments are those of launches. LATE_SENDS: a copy stands behind what was launched
    after the send. BROKEN: the driver refuses to copy after a while.
    """

    NOTHING, NO_WAITS, ALL_OVER, LAUNCH_TIMES, LATE_SENDS, BROKEN = range(6)


LOST = {Plant.NO_WAITS: "cuStreamWaitEvent", Plant.ALL_OVER: "cuEventQuery"}


@dataclass
class Result:
    """Of one rank: `words`, weights and sums by position; `moments`: when kernels were over."""

    words: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)
    records: list[IterationRecord] = field(default_factory=list)
    moments: dict[str, float | str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def run(job: Job, timeout: float = PATIENCE, plant: Plant = Plant.NOTHING) -> Outcome:
    """The job on the hostile driver, against its reference; with a fault, if one is planted."""
    outcome, rendezvous = Outcome(job), MemoryRendezvous()
    results = [Result() for _ in range(job.ranks)]
    done = threading.Barrier(job.ranks)
    for iteration in range(job.iterations):
        job.program(iteration)  # once for all ranks

    def rank(me: int) -> None:
        driver.enter(me, f"rank {me}")
        # Neighbours of a pair talk through memory, others over tcp.
        endpoint = Endpoint(me, "127.0.0.1", f"machine {me // 2}", rendezvous, timeout, ports=())
        stream = driver.stream("compute") if job.random("stream").random() < 0.5 else 0
        with driver.on(stream):
            try:
                train(driver, endpoint, job, me, timeout, plant, results[me])
            except Exception as error:
                outcome.errors.append(f"rank {me}: {type(error).__name__}: {error}")
                driver.give_up()
                done.abort()
            with contextlib.suppress(threading.BrokenBarrierError):
                done.wait(timeout)
            endpoint.close()
            cuda_device(torch.device("cuda", me)).close()

    waits = plant is not Plant.LATE_SENDS  # which would hang in them, not behind what is launched
    with contextlib.ExitStack() as stack:
        driver = stack.enter_context(Driver(job.ranks, job.queues, job.seed, waits))
        stack.enter_context(driver.as_torch_cuda())
        if plant in LOST:
            driver.lose(LOST[plant])
        if plant is Plant.BROKEN:
            driver.fail("cuMemcpyDtoHAsync", job.random("breaks").randrange(12))
        threads = [Thread(target=rank, args=(me,), daemon=True) for me in range(job.ranks)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 3 * timeout
        for me, thread in enumerate(threads):
            thread.join(max(0.0, end - time.monotonic()))
            assert not thread.is_alive(), f"{job}: rank {me} does not end: {driver.waits}"
        outcome.findings = driver.findings
        outcome.calls = driver.calls()
        if not outcome.errors:
            outcome.findings += times(driver, job, results)
            outcome.findings += [fault for result in results for fault in result.faults]
        lefts = [(r, driver.left(r)) for r in range(job.ranks)]
        outcome.left = [f"rank {r} has left {what}" for r, what in lefts if what]
    if not outcome.errors:
        positions = job.stages * job.chunks
        wanted = reference(positions, job.microbatches, job.iterations, job.words)
        got = [(p, words) for result in results for p, words in result.words.items()]
        outcome.wrong = [p for p, words in got if words != wanted[p]]
        assert sorted(p for p, _ in got) == sorted([*range(positions)] * job.replicas)
    gc.collect()  # an engine's memory takes many addresses until its endpoint is collected
    return outcome


def train(
    driver: Driver,
    endpoint: Endpoint,
    job: Job,
    me: int,
    timeout: float,
    plant: Plant,
    result: Result,
) -> None:
    """One rank's part."""
    replica, at = divmod(me, job.stages)
    near = {(at - 1) % job.stages, (at + 1) % job.stages} - {at}
    if job.chunks == 1:
        near = {peer for peer in near if abs(peer - at) == 1}
    ranks = [job.rank(replica, stage) for stage in range(job.stages)]
    endpoint.connect(sorted(ranks[peer] for peer in near), timeout)
    device = cuda_device(torch.device("cuda", me))
    staging = Staging(device, endpoint.engine)
    ends = {peer: End(ranks[peer], f"stage {peer}") for peer in near}
    emulator = LinkEmulator(at, job.rules)
    transport = DeviceTransport(endpoint, "pipeline", ends, staging, me, emulator, piece=job.piece)
    with contextlib.ExitStack() as stack:
        stack.callback(staging.close)
        stack.callback(transport.close)
        clock = HostDevice() if plant is Plant.LAUNCH_TIMES else device
        watchdog, probe = Watchdog(at, range(job.stages)), Probe(at, clock)
        reporting = WaitsReported(driver, transport, ranks, me, plant is Plant.LATE_SENDS)
        mailbox = Mailbox(
            Neighbours(at, Routes(job.stages, job.chunks)), reporting, probe, watchdog, timeout
        )
        kind = NativeStage if job.order == NATIVE else ExecutorStage
        others = Collectives(driver, job, replica, at)
        stage = kind(driver, clock, mailbox, job.chunks, job.words, others)
        for iteration in range(job.iterations):
            program = job.program(iteration)
            mailbox.begin(iteration, stage.new_message)
            probe.begin(iteration)
            for op in first_posts(program, at):  # as a session does at an iteration's end
                mailbox.post(op)
            stage.run(program)
            mailbox.finish()
            result.records.append(probe.pipeline_ends())
            probe.iteration_ends()
            staging.trim()
        mailbox.close()
        give_up(driver, transport, sorted(near), job, me)
        if driver.synchronize():
            return  # a deadlock, which is among the findings
        for one in stage.positions:
            result.words[one.at] = driver.read(one.weight).tolist(), driver.read(one.sum).tolist()
        result.moments = moments(stage.marks)
        known(probe, result.records)
        if fault := device.handle.fault():
            result.faults.append(f"rank {me}: the device's thread says: {fault}")
