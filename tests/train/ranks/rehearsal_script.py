"""A rank that rehearses our messages as on a GPU, on a CPU: its memory stands in for a GPU's.

Arguments: a folder, a fault of rehearsal_faults.py or "", and how many chunks a stage has; "2
apart": their messages do not overlap. Rank 0 prints what every rank found.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    from megatron_adaptra.adapter.baseline import cpu

    cpu.install()

import torch.distributed as dist
from rank_of_job import begin, of_all_ranks, show, states
from rehearsal_faults import FAULTS

from megatron_adaptra.adapter.baseline import gpt
from megatron_adaptra.adapter.entry.activate import activate
from megatron_adaptra.adapter.pipeline.rehearsal import Rehearsal
from megatron_adaptra.config import AdaptraConfig

ITERATIONS = 7
SHAPE = gpt.GPTShape(
    stages=3, layers=6, microbatches=6, hidden=32, seq_length=16,
    chunks=int(sys.argv[3].split()[0]), overlapped=sys.argv[3] == "2",
)  # fmt: skip


def train(dataset: Any, session: Any = None) -> tuple[list[Any], list[str]]:
    """What each iteration has for losses and a norm; and who has run it."""
    arm, found, runs = gpt.Arm.build(SHAPE, dataset), list[Any](), list[str]()
    function = gpt.forward_backward_function()
    for _ in range(ITERATIONS):
        arm.begin()
        found += [loss.item().hex() for loss in arm.forward_backward(function)]
        found.append(float(arm.optimizer.step()[1]).hex())
        if session is not None:
            session.iteration_done()
            run = session.run  # which has begun the next iteration
            runs.append("none" if run is None else "stock" if run.stock else "ours")
        arm.end()
    return [*found, arm.digest(), states(arm)], runs


def main() -> None:
    prefix = begin(Path(sys.argv[1]))
    torch.cuda.mem_get_info = lambda *_: (1 << 40, 1 << 40)
    gpt.initialize(SHAPE, timeout=60)
    dataset = gpt.build_dataset(prefix, SHAPE, 2 * ITERATIONS * SHAPE.microbatches)
    FAULTS[sys.argv[2]]()
    stock, _ = train(dataset)
    slow = ["1-0:1000s"] if sys.argv[2] == "path" else []
    activation = activate(AdaptraConfig(engine="native", timeout=60.0, emulate_link=slow))
    session = activation.session
    session._rehearsal = Rehearsal(session.context)
    session._sends = None  # over GPUs the emulated link does not hold Megatron's own messages
    try:
        found, runs = train(dataset, session)
    finally:
        activation.undo()
    show("FOUND", of_all_ranks({"same": found == stock, "runs": runs, "why": session._stock}))
    dist.destroy_process_group()


main()
