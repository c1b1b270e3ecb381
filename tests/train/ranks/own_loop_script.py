"""A training loop of a user's own in which one of two replicas skips a microbatch for a while.

Trains under stock Megatron and with the plugin. Rank 0 prints what every rank found.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from megatron_adaptra.adapter.baseline import cpu

cpu.install()

import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state as mpu  # noqa: E402
from rank_of_job import begin, of_all_ranks, show  # noqa: E402

from megatron_adaptra.adapter.baseline import gpt  # noqa: E402
from megatron_adaptra.adapter.entry.activate import activate  # noqa: E402
from megatron_adaptra.config import AdaptraConfig  # noqa: E402

SHAPE = gpt.GPTShape(stages=2, microbatches=4, hidden=32, seq_length=16)
FEWER = range(3, 6)  # iterations in which replica 1 has one microbatch less
ITERATIONS = 9


def train(dataset: Any, session: Any = None) -> tuple[list[str], list[str]]:
    """Losses and parameters; and who ran each iteration."""
    arm, found, runs = gpt.Arm.build(SHAPE, dataset), list[str](), list[str]()
    function = gpt.forward_backward_function()
    for iteration in range(ITERATIONS):
        fewer = iteration in FEWER and mpu.get_data_parallel_rank() == 1
        arm.shape = dataclasses.replace(SHAPE, microbatches=SHAPE.microbatches - fewer)
        arm.begin()
        before = session.iteration if session else 0
        found += [loss.item().hex() for loss in arm.forward_backward(function)]
        if session is not None:
            runs.append("ours" if session.run and session.iteration > before else "stock")
        arm.optimizer.step()
        arm.end()
    return [*found, arm.digest()], runs


def main() -> None:
    prefix = begin(Path(sys.argv[1]))
    gpt.initialize(SHAPE, timeout=60)
    dataset = gpt.build_dataset(prefix, SHAPE, 2 * ITERATIONS * SHAPE.microbatches)
    stock, _ = train(dataset)
    activation = activate(AdaptraConfig(small_collectives="on", timeout=60.0))
    try:
        found, runs = train(dataset, activation.session)
    finally:
        activation.undo()
    show("FOUND", of_all_ranks({"same": found == stock, "runs": runs}))
    dist.destroy_process_group()


main()
