"""One rank of test_schedules.py: trains models under stock Megatron and under schedules of ours.

Prints one JSON line per case, from rank 0: what stock and ours had at the end, on all ranks.
Arguments: a file with the cases (see `cases.py`), a folder for the dataset.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    from megatron_adaptra.adapter.baseline import cpu

    cpu.install()

import torch.distributed as dist
from cases import Case
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe import moe_utils
from rank_of_job import begin, of_all_ranks, show, states

from megatron_adaptra.adapter.baseline import gpt
from megatron_adaptra.adapter.entry.activate import activate
from megatron_adaptra.config import AdaptraConfig
from megatron_adaptra.ir.schedule import peak_in_flight

ITERATIONS = 3


def train(shape: gpt.GPTShape, dataset: Any, function: Any) -> dict[str, Any]:
    """What `ITERATIONS` iterations end with on this rank: losses of the last stage, parameters."""
    arm = gpt.Arm.build(shape, dataset)
    losses, steps = [], []
    for _ in range(ITERATIONS):
        arm.begin()
        losses += [loss.item().hex() for loss in arm.forward_backward(function)]
        stepped, norm, _ = arm.optimizer.step()
        steps.append([bool(stepped), None if norm is None else float(norm).hex()])
        arm.end()
    return {
        "losses": losses, "steps": steps, "parameters": arm.digest(), "random": states(arm),
        "statistics": statistics(),
    }  # fmt: skip


def statistics() -> dict[str, list[str]]:
    """What the experts' routers have noted for the log; it starts anew."""
    tracker = moe_utils.get_moe_layer_wise_logging_tracker()
    rows = {name: row["values"].tolist() for name, row in tracker.items()}
    found = {name: [x.hex() for x in row] for name, row in rows.items() if any(row)}
    for row in tracker.values():
        row["values"].zero_()
    return found


def ours(case: Case, dataset: Any) -> dict[str, Any]:
    config = AdaptraConfig(
        engine=case.engine,
        policy="adaptive" if case.schedule else case.policy,
        min_gain=1e9,  # what it begins with stays
        recompute=case.recompute,
        small_collectives="off",
        timeout=60.0,
    )
    activation = activate(config)
    session = activation.session
    if case.schedule:
        session.resumed = {"format": 1, "schedule": case.schedule, "delays": {}}
    session.reports.keep_records = range(ITERATIONS)
    try:
        found = train(case.shape, dataset, gpt.forward_backward_function())
        if case.engine == "stock":
            return found
        order = session.run.controller.ballot.schedule.order[session.stage]
        found["ran"] = [sorted({o.op.kind.value for o in r.ops}) for r in session.reports.records]
        found["predicted_peak"] = peak_in_flight(order, case.shape.chunks)
        found["peaks"] = [r.memory.peak if r.memory else None for r in session.reports.records]
        found["bytes"] = [
            r.memory.peak_bytes if r.memory else None for r in session.reports.records
        ]
    finally:
        activation.undo()
    return found


def main() -> None:
    cases = [Case.load(data) for data in json.loads(Path(sys.argv[1]).read_text())]
    prefix = begin(Path(sys.argv[2]))
    groups: Any = None
    references: dict[Any, Any] = {}
    for case in cases:
        shape = case.shape
        wanted = shape.stages, shape.chunks, shape.tensor_parallel
        if wanted != groups:
            if groups is not None:
                mpu.destroy_model_parallel()
            gpt.initialize(shape, timeout=60)
            groups = wanted
        dataset = gpt.build_dataset(prefix, shape, 8 * ITERATIONS * shape.microbatches)
        plain = replace(shape, overlapped=False)
        if plain not in references:
            references[plain] = train(plain, dataset, gpt.forward_backward_function())
        both = {"name": case.name, "stock": references[plain], "ours": ours(case, dataset)}
        show("CASE", of_all_ranks(both))
    dist.destroy_process_group()


main()
