"""One rank of test_home_random_training.py: gradients in double precision, dropout by home.

Prints one JSON line per case, from rank 0: of all ranks. Arguments: a file with the cases, of which
the first runs all microbatches at home, a folder for the dataset.
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
from rank_of_job import begin, of_all_ranks, show, states

from megatron_adaptra.adapter.baseline import gpt
from megatron_adaptra.adapter.baseline.shape import GPTShape
from megatron_adaptra.adapter.compat.patch_attr import patch_attr
from megatron_adaptra.adapter.entry.activate import activate
from megatron_adaptra.adapter.pipeline.resumed import Fits
from megatron_adaptra.adapter.pipeline.run import Run
from megatron_adaptra.config import AdaptraConfig
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.schedule import Schedule

ITERATIONS = 2


def train(case: dict[str, Any], shape: GPTShape, dataset: Any) -> dict[str, Any]:
    """Losses by iteration, home and microbatch; gradients; whether own generators are as before."""
    config = AdaptraConfig(
        engine="executor", reroute="auto", min_gain=1e9, small_collectives="off", timeout=60.0,
        recompute=True,
    )  # fmt: skip
    activation = activate(config)
    session = activation.session
    session.resumed = {"schedule": case["schedule"]}
    arm = gpt.Arm.build(shape, dataset)
    losses, gradients, kept = {}, [], []
    function = gpt.forward_backward_function()
    try:
        arm.begin()
        arm.forward_backward(function)  # the job's first iteration is stock Megatron's
        arm.end()
        for iteration in range(ITERATIONS):
            arm.begin()
            before = states(arm)
            found = arm.forward_backward(function)
            arm.end()
            kept.append(states(arm) == before)
            gradients += [p.main_grad.clone() for m in arm.models for p in m.parameters()]
            line = Schedule.parse(case["schedule"]).order[session.context.worker]
            own = [op for op in line if op.kind is Kind.F]
            for op, loss in zip(own, found, strict=bool(found)):
                losses[f"{iteration}: {op.microbatch}@{op.home}"] = loss.item()
            limits = dict(session.run.wiring.plan_group.limits)
    finally:
        activation.undo()
    return {"losses": losses, "gradients": gradients, "kept": kept, "limits": limits}


def error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Of the worst parameter, as a share of its gradient's norm."""
    pairs = zip(found, exact, strict=True)
    return max(float((a - b).norm() / b.norm().clamp_min(1e-300)) for a, b in pairs)


def take(_: Fits, state: dict[str, Any]) -> tuple[Schedule, dict[str, float]]:
    """Any order at all, in which no planner would put microbatches."""
    return Schedule.parse(state["schedule"]), {}


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    prefix = begin(Path(sys.argv[2]))
    shape = GPTShape(**cases[0]["shape"])
    gpt.initialize(shape, timeout=60)
    dataset = gpt.build_dataset(prefix, shape, 64)
    torch.set_default_dtype(torch.float64)
    gpt.DTYPES["fp32"] = torch.float64
    patch_attr(Fits, "take", take)
    by_home, exact = Run.by_home, []
    for case in cases:
        patch_attr(Run, "by_home", property(lambda _: True) if case["forced"] else by_home)
        row = train(case, shape, dataset)
        exact = exact or row["gradients"]
        row["error"] = error(row.pop("gradients"), exact)
        row["types"] = str(exact[0].dtype)
        show("CASE", {"name": case["name"], "ranks": of_all_ranks(row)})
    mpu.destroy_model_parallel()
    dist.destroy_process_group()


main()
