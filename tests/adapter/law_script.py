"""One rank of test_law.py: trains once as stock Megatron, then under one fault after the other.

Arguments: a file with the cases, or "" to find the sites; a folder for the dataset; how many
replicas of two stages a job has, two of which exchange partners. Prints a line before every case,
and one with what came of it. Several jobs share the cases.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    from megatron_adaptra.adapter.baseline import cpu

    cpu.install()

import torch.distributed as dist
from law import Discovery, Fault, Site

from megatron_adaptra import waits
from megatron_adaptra.adapter.baseline import gpt
from megatron_adaptra.adapter.entry.activate import activate
from megatron_adaptra.config import AdaptraConfig

REPLICAS = int(sys.argv[3])
# A plan for what is slow is in force for the last ones; links between replicas are opened before.
ITERATIONS, MICROBATCHES = (9, 4) if REPLICAS == 1 else (20, 2)
SHAPE = gpt.GPTShape(
    stages=2, microbatches=MICROBATCHES, layers=2, hidden=16, heads=2, seq_length=16, dropout=0.0
)
ENGINES = ("executor", "native")
HASTE = {  # seconds, instead of up to minutes
    "CLOSE": 0.5, "POLL": 0.1, "STORE": 0.5, "HEARTBEAT": 0.2, "START": 1.0, "WORK": 0.3,
    "END": 1.0,
}  # fmt: skip


def say(line: str) -> None:
    """A line of its own, whatever else is printed meanwhile."""
    os.write(1, f"\n{line}\n".encode())


def train(dataset: Any, session: Any = None) -> list[Any]:
    """What every iteration has for a loss and a norm, and in the end parameters and states."""
    arm, found = gpt.Arm.build(SHAPE, dataset), list[Any]()
    function = gpt.forward_backward_function()
    for _ in range(ITERATIONS):
        arm.begin()
        losses = arm.forward_backward(function)
        if REPLICAS == 1:  # else they stand where the last stage of their home has run
            found += [loss.item().hex() for loss in losses]
        _, norm, _ = arm.optimizer.step()
        found.append(float(norm).hex())
        if session is not None:
            session.iteration_done()
        arm.end()
    return [*found, arm.digest(), arm.states()]


def adapted(dataset: Any, engine: str, log: Path) -> tuple[list[Any], str]:
    """The same with the plugin, and the plan it ended with."""
    config = AdaptraConfig(
        engine=engine, recompute=engine == "executor", emulate_link=["0-1:6ms"], min_gain=0.0,
        small_collectives="on", timeout=60.0, decision_log=str(log),
    )  # fmt: skip
    if REPLICAS > 1:
        config = dataclasses.replace(
            config, reroute="swap", recompute=False, emulate_link=["0.0-0.1:40ms"], min_gain=0.03
        )
    activation = activate(config)
    ours = activation.session
    try:
        found = train(dataset, ours)
        plan = "stock"
        if ours.run:
            schedule = ours.run.controller.ballot.schedule
            plan = f"{schedule.warmup}{' swapped' if schedule.routes.moved else ''}"
    finally:
        activation.undo()
    return found, str(plan)


def find(dataset: Any, stock: list[Any], folder: Path) -> None:
    for engine in ENGINES:
        with Discovery() as seen:
            found, plan = adapted(dataset, engine, folder / f"{engine}.jsonl")
        calls = {json.dumps([s.caller, s.callee]): n for s, n in seen.calls.items()}
        answer = {
            "engine": engine, "calls": calls, "waits": sorted(seen.waits), "plan": plan,
            "same": found == stock,
        }  # fmt: skip
        say("FOUND " + json.dumps(answer))


def fail(case: dict[str, Any], dataset: Any, stock: list[Any], rank: int, log: Path) -> None:
    fault = Fault(Site(*case["site"]), case["kind"], case["first"][rank])
    began, spent = time.monotonic(), time.process_time()
    with fault if rank in case["ranks"] else contextlib.nullcontext():
        found, plan = adapted(dataset, case["engine"], log)
    answer = {
        "same": found == stock, "hits": fault.hits, "plan": plan,
        "seconds": round(time.monotonic() - began, 2),
        "cpu": round(time.process_time() - spent, 2),
    }  # fmt: skip
    say("END " + json.dumps(answer))


def main() -> None:
    ranks = SHAPE.stages * REPLICAS
    job, rank = divmod(int(os.environ["RANK"]), ranks)
    jobs = int(os.environ["WORLD_SIZE"]) // ranks
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=300))
    store = dist.PrefixStore(f"job {job}", shared)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    folder = Path(sys.argv[2]) / f"job{job}"
    if rank == 0:
        gpt.write_dataset(None, folder / "data", limit=100_000)
    dist.barrier()
    gpt.initialize(SHAPE, timeout=60)
    dataset = gpt.build_dataset(folder / "data" / "text", SHAPE, 8 * ITERATIONS * REPLICAS)
    stock = train(dataset)
    for name, seconds in HASTE.items():
        assert hasattr(waits, name), name
        setattr(waits, name, seconds)
    if not sys.argv[1]:
        find(dataset, stock, folder)
    cases = json.loads(Path(sys.argv[1]).read_text())[job::jobs] if sys.argv[1] else []
    for number, case in enumerate(cases):
        if number % 10 == 9:
            gc.collect()
        say("BEGIN " + json.dumps(case))
        fail(case, dataset, stock, rank, folder / "log.jsonl")
        dist.barrier()
    say("DONE")
    dist.destroy_process_group()


main()
