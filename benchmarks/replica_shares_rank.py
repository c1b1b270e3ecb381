"""One rank of replica_shares.py: the same training with stock's counts, then with found ones.

Or, where nobody is slow, one training that is measured and voted on in every second block of
iterations. Argument: a file with Settings as JSON. In the slow phase rank 0 keeps the file SLOW
beside it, in which replica_shares.py suspends a replica. At the end it writes there what all ranks
have measured.
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
from megatron_adaptra.adapter.shares.shares import Shares  # noqa: E402
from megatron_adaptra.config import AdaptraConfig  # noqa: E402
from megatron_adaptra.emulate.worker_emulator import WorkerEmulator  # noqa: E402
from megatron_adaptra.execute.shares.adaptive import AdaptiveShares  # noqa: E402

RESULT, DECISIONS, SLOW = "result.json", "decisions.jsonl", "slow"
TIMEOUT = 60.0
NEVER = 1e9  # times an iteration, that counts would have to save


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
    block: int = 0  # iterations of each; 0 for two trainings


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


def in_blocks(settings: Settings, shape: gpt.GPTShape, dataset: Any) -> list[list[float]]:
    """By rank, the seconds of each iteration; with shares in every second block, and the first.

    In the others Megatron's schedule runs as if there were none.
    """
    ours, off = Shares.forward_backward, [False]

    def now_and_then(shares: Shares, run: Any, arguments: Any) -> Any:
        if not off[0]:
            return ours(shares, run, arguments)
        if isinstance(shares._source, AdaptiveShares):
            shares._source._began = None  # what comes next does not follow the one before
        return run(arguments)

    config = AdaptraConfig(
        sync="share", timeout=TIMEOUT, emulate_worker=settings.emulated, min_gain=NEVER
    )
    activation, seconds = activate(config), list[float]()
    assert activation.shares is not None
    Shares.forward_backward = now_and_then  # type: ignore[method-assign]
    arm, function = gpt.Arm.build(shape, dataset), gpt.forward_backward_function()
    for iteration in range(settings.iterations):
        off[0] = iteration >= settings.block and iteration // settings.block % 2 == 0
        began = time.monotonic()
        arm.begin()
        arm.forward_backward(function)
        arm.optimizer.step()
        arm.end()
        seconds.append(time.monotonic() - began)
        assert activation.shares.plan.full
    activation.undo()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, seconds)
    return found


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
    found: dict[str, Any] = (
        {"seconds": in_blocks(settings, shape, dataset)}
        if settings.block
        else {
            sync: train(settings, shape, dataset, sync, path.parent, emulators)
            for sync in ("full", "share")
        }
    )
    if dist.get_rank() == 0:
        (path.parent / RESULT).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
