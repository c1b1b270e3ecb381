"""One rank of replica_shares.py: the same training with stock's counts, then with found ones.

Argument: a file with Settings as JSON. In the slow phase rank 0 keeps the file SLOW beside it, in
which replica_shares.py suspends a replica. At the end it writes there what all ranks have measured.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_adaptra.adapter.baseline import cpu

cpu.install()

import torch.distributed as dist  # noqa: E402

from megatron_adaptra.adapter.baseline import gpt  # noqa: E402
from megatron_adaptra.adapter.entry.activate import activate  # noqa: E402
from megatron_adaptra.config import AdaptraConfig  # noqa: E402
from megatron_adaptra.runtime.worker_emulator import WorkerEmulator  # noqa: E402

RESULT, DECISIONS, SLOW = "result.json", "decisions.jsonl", "slow"
TIMEOUT = 60.0


@dataclass(frozen=True)
class Settings:
    """What all ranks do.

    `slow_from`, `slow_to`: the first iteration of the slow phase, the one after its last.
    `emulated`: rules of workers that wait after each op, in both trainings.
    """

    microbatches: int
    hidden: int
    seq_length: int
    iterations: int
    slow_from: int
    slow_to: int
    emulated: list[str]


def train(
    settings: Settings,
    shape: gpt.GPTShape,
    dataset: Any,
    sync: str,
    folder: Path,
    emulators: list[WorkerEmulator],
) -> Any:
    """By iteration: its seconds, its loss and its counts, all of this rank.

    `emulators`: of the trainings before, in which ops are as long; this one's is added.
    """
    config = AdaptraConfig(
        sync=sync, timeout=TIMEOUT, emulate_worker=settings.emulated,
        decision_log=str(folder / sync / DECISIONS),
    )  # fmt: skip
    activation = activate(config)
    if (emulator := activation.session.context.worker_emulator) is not None:
        for other in emulators[:1]:
            emulator.like(other)
        emulators.append(emulator)
    arm, function = gpt.Arm.build(shape, dataset), gpt.forward_backward_function()
    seconds, losses, counts = [], [], []
    for iteration in range(settings.iterations):
        if dist.get_rank() == 0 and iteration == settings.slow_from:
            (folder / SLOW).touch()
        if dist.get_rank() == 0 and iteration == settings.slow_to:
            (folder / SLOW).unlink()
        began = time.monotonic()
        arm.begin()
        pairs = arm.forward_backward(function)
        shared = activation.shares
        counts.append(list(shared.plan.counts) if shared is not None else [])
        arm.optimizer.step()
        arm.end()
        seconds.append(time.monotonic() - began)
        losses.append([float(loss) for loss in pairs])
    digest = arm.digest()
    activation.undo()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (seconds, losses, counts, digest))
    names = ("seconds", "losses", "counts", "digest")
    return {name: [of_rank[i] for of_rank in found] for i, name in enumerate(names)}


def main() -> None:
    path = Path(sys.argv[1])
    settings = Settings(**json.loads(path.read_text()))
    dist.init_process_group("gloo")
    shape = gpt.GPTShape(
        stages=1, microbatches=settings.microbatches, layers=2, hidden=settings.hidden,
        seq_length=settings.seq_length, dropout=0.0,
    )  # fmt: skip
    gpt.initialize(shape, TIMEOUT)
    prefix = path.parent / "data" / "text"
    for sync in ("full", "share"):
        (path.parent / sync).mkdir(exist_ok=True)
    if dist.get_rank() == 0:
        gpt.write_dataset(None, prefix.parent, limit=200_000)
    dist.barrier()
    samples = settings.iterations * settings.microbatches * dist.get_world_size()
    dataset = gpt.build_dataset(prefix, shape, samples)
    emulators: list[WorkerEmulator] = []
    found = {
        sync: train(settings, shape, dataset, sync, path.parent, emulators)
        for sync in ("full", "share")
    }
    if dist.get_rank() == 0:
        (path.parent / RESULT).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
