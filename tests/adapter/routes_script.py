"""One rank of test_replica_routes.py: trains under routes between replicas, and as stock does.

Prints one JSON line per case, from rank 0: what stock and ours had at the end, on all ranks; a case
may ask for stock with the replicas' data permuted, too.
Arguments: a file with the cases, a folder for the dataset.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    from megatron_adaptra.adapter.baseline import cpu

    cpu.install()

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from rank_of_job import begin, of_all_ranks, show

from megatron_adaptra.adapter.baseline import gpt
from megatron_adaptra.adapter.baseline.shape import GPTShape
from megatron_adaptra.adapter.entry.activate import activate
from megatron_adaptra.config import AdaptraConfig


def train(shape: GPTShape, dataset: Any, function: Any, iterations: int) -> dict[str, Any]:
    """What that many iterations end with on this rank: losses, gradients' norms, parameters."""
    arm = gpt.Arm.build(shape, dataset)
    losses, norms = [], []
    for _ in range(iterations):
        arm.begin()
        losses.append([loss.item() for loss in arm.forward_backward(function)])
        _, norm, _ = arm.optimizer.step()
        norms.append(norm)
        arm.end()
    weights = [p.detach().double().norm().item() for m in arm.models for p in m.parameters()]
    return {
        "losses": losses, "norms": norms, "parameters": arm.digest(), "random": arm.states(),
        "weights": weights,
    }  # fmt: skip


def permuted(homes: list[int], *arguments: Any) -> dict[str, Any]:
    """The same in stock Megatron, where replica r gets the data of homes[r]."""
    batches = gpt._Batches
    gpt._Batches = lambda arm, replica: batches(arm, homes[replica])
    try:
        return train(*arguments)
    finally:
        gpt._Batches = batches


def routed(case: dict[str, Any], shape: GPTShape, dataset: Any) -> dict[str, Any]:
    """The same under the schedule of a case, which holds all replicas."""
    config = AdaptraConfig(
        engine=case["engine"], transport=case["transport"], reroute="auto", min_gain=1e9,
        small_collectives="off", timeout=60.0,
    )  # fmt: skip
    activation = activate(config)
    session = activation.session
    session.resumed = {"format": 1, "schedule": case["schedule"], "delays": {}}
    session.keep_records = range(case["iterations"])
    try:
        found = train(shape, dataset, gpt.forward_backward_function(), case["iterations"])
        order = session.run.controller.ballot.schedule.order[session.context.worker]
        found["ran"] = [" ".join(str(o.op) for o in r.ops) for r in session.records]
        found["planned"] = " ".join(map(str, order))
    finally:
        activation.undo()
    return found


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    prefix = begin(Path(sys.argv[2]))
    references: dict[Any, Any] = {}
    for case in cases:
        shape = GPTShape(**case["shape"])
        if not references:
            gpt.initialize(shape, timeout=60)
        samples = 8 * case["iterations"] * shape.microbatches
        dataset = gpt.build_dataset(prefix, shape, samples)
        stock = shape, dataset, gpt.forward_backward_function(), case["iterations"]
        if shape not in references:
            references[shape] = train(*stock)
        both = {"stock": references[shape], "ours": routed(case, shape, dataset)}
        both["permuted"] = [permuted(homes, *stock) for homes in case["permuted"]]
        both["place"] = [mpu.get_data_parallel_rank(), mpu.get_pipeline_model_parallel_rank()]
        show("CASE", {"name": case["name"], "ranks": of_all_ranks(both)})
    dist.destroy_process_group()


main()
