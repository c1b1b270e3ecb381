"""A rank whose plugin comes and goes, at moments of its own, beside children that come and go.

Rank 0 prints what every rank has trained, and has had open after each cycle. Arguments: a folder
for the dataset, a seed, the number of cycles.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import random
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

from megatron_adaptra.adapter.baseline import gpt
from megatron_adaptra.adapter.entry.activate import activate
from megatron_adaptra.config import AdaptraConfig

STAGES, ITERATIONS = 3, 2  # iterations of a cycle
STOPPED = 0.5  # seconds that a rank is stopped for


def descriptors_and_threads() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


class Life:
    def __init__(self, folder: Path, seed: int, cycles: int) -> None:
        self.rank, self.cycles = dist.get_rank(), cycles
        self.all, self.mine = random.Random(seed), random.Random(f"{seed} {self.rank}")
        self.shape = gpt.GPTShape(stages=STAGES, layers=3, microbatches=4, hidden=32, seq_length=16)
        gpt.initialize(self.shape, timeout=60)
        if self.rank == 0:
            gpt.write_dataset(None, folder, limit=200_000)
        dist.barrier()
        samples = cycles * ITERATIONS * self.shape.microbatches
        self.dataset = gpt.build_dataset(folder / "text", self.shape, samples)

    def stock(self) -> list[Any]:
        arm = gpt.Arm.build(self.shape, self.dataset)
        function = gpt.forward_backward_function()
        return [self._iterations(arm, function) for _ in range(self.cycles)]

    def ours(self) -> tuple[list[Any], list[tuple[int, int]]]:
        arm, found = gpt.Arm.build(self.shape, self.dataset), []
        counts = [descriptors_and_threads()]
        native = gpt.forward_backward_function(), dist.all_reduce
        for cycle in range(self.cycles):
            self._pause()
            engine = ("native", "executor")[cycle % 2]
            config = AdaptraConfig(engine=engine, small_collectives="on", timeout=60.0)
            activation = activate(config)
            session = activation.session
            activation.undo_with(session.watchdog.end_on_signal())
            found.append(self._iterations(arm, gpt.forward_backward_function(), session))
            assert len(session.run.controller._channels) > 0
            self._pause()
            activation.undo()
            del activation, session
            assert native == (gpt.forward_backward_function(), dist.all_reduce)
            counts.append(descriptors_and_threads())
        return found, counts

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
    dist.init_process_group("gloo")
    life = Life(Path(sys.argv[1]) / "data", int(sys.argv[2]), int(sys.argv[3]))
    stock = life.stock()
    ours, counts = life.ours()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {"same": ours == stock, "counts": counts})
    if dist.get_rank() == 0:
        print("LIFE " + json.dumps(everyone), flush=True)
    dist.destroy_process_group()


main()
