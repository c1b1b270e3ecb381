"""A rank whose plugin comes and goes, at moments of its own, beside children that come and go.

Every cycle begins with another checkpoint's plan, which fits or not. Rank 0 prints what every rank
has trained, whose plans it ran, and what it has had open after each cycle. Arguments: a folder for
the dataset, a seed.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    from megatron_adaptra.adapter.baseline import cpu

    cpu.install()

import torch.distributed as dist
from rank_of_job import begin, of_all_ranks, show

from megatron_adaptra.adapter.baseline import gpt
from megatron_adaptra.adapter.entry.activate import activate
from megatron_adaptra.base import waits
from megatron_adaptra.config import AdaptraConfig
from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan import make_plan
from megatron_adaptra.transport.descriptors import SPARE

STAGES, COUNT, ITERATIONS = 3, 4, 2  # microbatches; iterations of a cycle
STOPPED = 0.5  # seconds that a rank is stopped for
MOMENT = 20.0  # seconds that a thread may take to be gone after it was joined


def descriptors_and_threads(before: tuple[int, int] | None = None) -> tuple[int, int]:
    """What is open; waits for `before`: a thread that was joined may be there for a moment."""
    gc.collect()
    end = time.monotonic() + MOMENT
    while True:
        found = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        if before in (None, found) or time.monotonic() > end:
            return found
        time.sleep(0.01)


def plan(schedule: Schedule) -> dict[str, Any]:
    return {"format": 1, "schedule": schedule.text(), "delays": {"0>1": 0.04}}


def cycles() -> list[tuple[dict[str, Any], Any]]:
    """Settings, and what a checkpoint's file holds; the first two plans fit."""
    even = (0.01,) * STAGES
    links = dict.fromkeys([(1, 2), (2, 1)], LinkState(0.05))
    slow = Conditions(COUNT, even, even, even, links)
    deeper = plan(make_plan(slow, "warmup").schedule)
    halves = plan(make_plan(slow, "zb-h2").schedule)
    native, executor = {"engine": "native"}, {"engine": "executor"}
    return [
        (native, deeper),
        (executor, halves),
        (native, halves),
        (executor, "it cannot be read"),
        (native, None),
    ]


class Life:
    def __init__(self, prefix: Path, seed: int) -> None:
        self.rank, self.cycles = dist.get_rank(), cycles()
        self.all, self.mine = random.Random(seed), random.Random(f"{seed} {self.rank}")
        self.shape = gpt.GPTShape(
            stages=STAGES, layers=3, microbatches=COUNT, hidden=32, seq_length=16
        )
        gpt.initialize(self.shape, timeout=60)
        samples = len(self.cycles) * ITERATIONS * self.shape.microbatches
        self.dataset = gpt.build_dataset(prefix, self.shape, samples)
        self.native = gpt.forward_backward_function()

    def stock(self) -> list[Any]:
        arm = gpt.Arm.build(self.shape, self.dataset)
        function = gpt.forward_backward_function()
        return [self._iterations(arm, function) for _ in self.cycles]

    def ours(self) -> tuple[list[Any], list[bool], list[tuple[int, int]]]:
        arm, found, taken = gpt.Arm.build(self.shape, self.dataset), [], []
        counts, kept = [descriptors_and_threads()], []
        native = gpt.forward_backward_function(), dist.all_reduce
        for settings, resumed in self.cycles:
            self._pause()
            config = AdaptraConfig(small_collectives="on", timeout=60.0, **settings)
            activation = activate(config)
            session = activation.session
            session.resumed = resumed
            activation.undo_with(session.watchdog.end_on_signal())
            found.append(self._iterations(arm, gpt.forward_backward_function(), session))
            order = session.run.controller.ballot.schedule.order
            theirs = resumed.get("schedule") if isinstance(resumed, dict) else None
            taken.append(theirs is not None and Schedule.parse(theirs).order == order)
            self._pause()
            activation.undo()
            kept.append(activation)  # as a user may
            assert native == (gpt.forward_backward_function(), dist.all_reduce)
            counts.append(descriptors_and_threads(counts[0]))
        return found, taken, counts

    def unreachable(self) -> bool:
        """Whether a job with a rank that has no address trains as stock."""
        before = descriptors_and_threads()
        if self.rank == 1:
            os.environ["GLOO_SOCKET_IFNAME"] = "nonesuch"
        waits.START = 3.0
        trained = self._trains_as_stock()
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        return trained and descriptors_and_threads(before) == before

    def crowded(self) -> bool:
        """Whether a job in which one rank can open nothing more trains as stock."""
        if self.rank == 0:
            limit = len(os.listdir("/proc/self/fd")) + SPARE // 2
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        return self._trains_as_stock()

    def _trains_as_stock(self) -> bool:
        stock = self._iterations(gpt.Arm.build(self.shape, self.dataset), self.native)
        activation = activate(AdaptraConfig(timeout=60.0))
        arm = gpt.Arm.build(self.shape, self.dataset)
        ours = self._iterations(arm, gpt.forward_backward_function())
        refused = activation.session.run is None
        activation.undo()
        return refused and ours == stock

    def _iterations(self, arm: Any, function: Any, session: Any = None) -> list[Any]:
        losses = []
        for _ in range(ITERATIONS):
            arm.begin()
            losses += [loss.item().hex() for loss in arm.forward_backward(function)]
            if session is not None:
                self._live()
            _, norm, _ = arm.optimizer.step()
            losses.append(float(norm).hex())
            if session is not None:
                session.iteration_done()
            arm.end()
        return [losses, arm.digest()]

    def _live(self) -> None:
        """What else happens in a rank."""
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        child.start()
        self._pause()
        child.terminate()
        child.join()
        assert child.exitcode == -signal.SIGTERM
        if self.all.randrange(8) == self.rank:
            self._stop()

    def _pause(self) -> None:
        time.sleep(self.mine.choice((0, 0, 0.02, 0.2)))

    def _stop(self) -> None:
        """All threads of this rank stand still for a while."""
        rank, child = os.getpid(), os.fork()
        if child == 0:
            os.kill(rank, signal.SIGSTOP)
            time.sleep(STOPPED)
            os.kill(rank, signal.SIGCONT)
            os._exit(0)
        os.waitpid(child, 0)


def main() -> None:
    life = Life(begin(Path(sys.argv[1])), int(sys.argv[2]))
    stock = life.stock()
    ours, taken, counts = life.ours()
    mine = {"same": ours == stock, "taken": taken, "counts": counts}
    mine |= {"unreachable": life.unreachable(), "crowded": life.crowded()}
    show("LIFE", of_all_ranks(mine))
    dist.destroy_process_group()


main()
