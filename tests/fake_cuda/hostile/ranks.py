"""Ranks as threads of one process: each with its own device, engine, transport and mailbox."""

from __future__ import annotations

import contextlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from fake_cuda.hostile.driver import HOSTILE, Driver
from fake_cuda.hostile.jobs import NATIVE, Job
from fake_cuda.hostile.loops import ExecutorStage, NativeStage
from fake_cuda.hostile.stage_model import reference
from patience import PATIENCE

from megatron_adaptra.device.cuda import cuda_device
from megatron_adaptra.device.staging import Staging
from megatron_adaptra.ir.unused_posts import first_posts
from megatron_adaptra.runtime.mailbox import Mailbox
from megatron_adaptra.runtime.watchdog import Watchdog
from megatron_adaptra.telemetry.probe import Probe
from megatron_adaptra.transport.engine.endpoint import Endpoint
from megatron_adaptra.transport.engine.on_device import DeviceTransport
from megatron_adaptra.transport.engine.transport import End

_names = itertools.count()  # of jobs in this process: their messages never meet


class _Board:
    """Where the endpoints of one process find each other."""

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


class Ranks:
    """The endpoints of so many ranks of this process; several jobs may follow each other.

    Neighbours of a pair talk through memory, others over tcp.
    """

    def __init__(self, count: int) -> None:
        board = _Board()
        self.endpoints = [
            Endpoint(rank, "127.0.0.1", f"machine {rank // 2}", board, PATIENCE, ports=())
            for rank in range(count)
        ]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for endpoint in self.endpoints:
            endpoint.close()

    def run(self, job: Job, timeout: float = PATIENCE) -> Outcome:
        """The job on the hostile driver, against its reference."""
        outcome, name = Outcome(job), f"job {next(_names)}"
        results: list[Any] = [None] * job.stages
        done = threading.Barrier(job.stages)

        def rank(me: int) -> None:
            driver.enter(me, f"rank {me}")
            stream = driver.stream("compute") if job.random("stream").random() < 0.5 else 0
            with driver.on(stream):
                try:
                    results[me] = _train(driver, self.endpoints[me], job, me, name, timeout)
                except Exception as error:
                    outcome.errors.append(f"rank {me}: {type(error).__name__}: {error}")
                    done.abort()
                with contextlib.suppress(threading.BrokenBarrierError):
                    done.wait(timeout)
                cuda_device(torch.device("cuda", me)).close()

        with Driver(job.stages, job.queues, job.seed, HOSTILE) as driver, driver.as_torch_cuda():
            with ThreadPoolExecutor(job.stages) as pool:
                for future in [pool.submit(rank, me) for me in range(job.stages)]:
                    if error := future.exception(2 * timeout):
                        outcome.errors.append(f"{type(error).__name__}: {error}")
            outcome.findings = driver.findings
            outcome.calls = driver.calls()
            lefts = [(r, driver.left(r)) for r in range(job.stages)]
            outcome.left = [f"rank {r} has left {what}" for r, what in lefts if what]
        if not outcome.errors:
            positions = job.stages * job.chunks
            wanted = reference(positions, job.microbatches, job.iterations, job.words)
            got = {p: words for result in results for p, words in result.items()}
            outcome.wrong = [p for p in range(positions) if got[p] != wanted[p]]
        return outcome


def _train(
    driver: Driver, endpoint: Endpoint, job: Job, me: int, name: str, timeout: float
) -> dict[int, tuple[list[int], list[int]]]:
    """One rank's part; by position the weights and sums of gradients at its end."""
    near = {(me - 1) % job.stages, (me + 1) % job.stages} - {me}
    if job.chunks == 1:
        near = {peer for peer in near if abs(peer - me) == 1}
    endpoint.connect(sorted(near), timeout)
    device = cuda_device(torch.device("cuda", me))
    staging = Staging(device, endpoint.engine)
    ends = {peer: End(peer, f"stage {peer}") for peer in near}
    transport = DeviceTransport(endpoint, name, ends, staging, me)
    try:
        watchdog = Watchdog(me, range(job.stages))
        mailbox = Mailbox(me, job.stages, transport, Probe(me), watchdog, timeout)
        kind = NativeStage if job.order == NATIVE else ExecutorStage
        stage = kind(driver, mailbox, job.chunks, job.words)
        programs = [job.program(i) for i in range(job.iterations)]
        for iteration, program in enumerate(programs):
            mailbox.begin(iteration, stage.new_message)
            mailbox.probe.begin(iteration)
            for op in first_posts(program, me):  # as a session does at an iteration's end
                mailbox.post(op)
            stage.run(program)
            mailbox.finish()
            staging.trim()
        mailbox.close()
        assert driver.synchronize() == 0, driver.findings
        return {
            p.at: tuple(driver.read(t).tolist() for t in (p.weight, p.sum)) for p in stage.positions
        }
    finally:
        transport.close()
        staging.close()
