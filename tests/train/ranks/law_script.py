"""One rank of test_law.py: trains once as stock Megatron, then under one fault after the other.

Arguments: a file with the cases, or "" to find the sites; a folder for the dataset; which of JOBS.
Prints a line before every case, and one with what came of it. Several jobs share the cases.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    from megatron_adaptra.adapter.baseline import cpu

    cpu.install()

import pytest
import torch.distributed as dist
from law import Discovery, Fault, Site
from megatron.core import parallel_state as mpu
from rank_of_job import mean_losses, of_all_ranks, states

from megatron_adaptra.adapter.baseline import gpt
from megatron_adaptra.adapter.entry.activate import activate
from megatron_adaptra.adapter.shares.share_times import ScheduleTimes, Timed
from megatron_adaptra.base import waits
from megatron_adaptra.config import AdaptraConfig


@dataclass(frozen=True)
class Job:
    """What is trained: so many replicas of so many stages, of which something is slow."""

    stages: int
    replicas: int
    microbatches: int
    iterations: int  # a plan for what is slow is in force for the last ones
    settings: dict[str, Any] = field(default_factory=dict)
    engines: tuple[str, ...] = ("executor", "native")

    @property
    def ranks(self) -> int:
        return self.stages * self.replicas


JOBS = {
    "pipeline": Job(2, 1, 4, 9, {"emulate_link": ["0-1:6ms"], "min_gain": 0.0}),
    # Two replicas exchange partners, for which links between them are opened before.
    "replicas": Job(
        2, 2, 2, 20, {"reroute": "swap", "emulate_link": ["0.0-0.1:40ms"], "min_gain": 0.03}
    ),
    "shares": Job(1, 2, 4, 14, {"sync": "share"}, ("native",)),
}
JOB = JOBS[sys.argv[3]]
SHARES = sys.argv[3] == "shares"
SHAPE = gpt.GPTShape(
    stages=JOB.stages, microbatches=JOB.microbatches, layers=2, hidden=16, heads=2, seq_length=16,
    dropout=0.0,
)  # fmt: skip
SETTLED = 0.3  # seconds that an iteration waits for what chooses counts
HASTE = {  # seconds, instead of up to minutes
    "CLOSE": 0.5, "POLL": 0.1, "STORE": 0.5, "HEARTBEAT": 0.2, "START": 1.0, "WORK": 0.3,
    "END": 1.0,
}  # fmt: skip


def say(line: str) -> None:
    """A line of its own, whatever else is printed meanwhile."""
    os.write(1, f"\n{line}\n".encode())


def train(dataset: Any, activation: Any = None) -> tuple[list[Any], str]:
    """What has to be as in stock, and what ran: the plan at the end, or all counts.

    Every loss and norm, and in the end parameters and states; under shares mean losses alone.
    """
    arm, found, losses, counts = gpt.Arm.build(SHAPE, dataset), list[Any](), [], []
    function = gpt.forward_backward_function()
    for _ in range(JOB.iterations):
        arm.begin()
        losses.append([float(loss) for loss in arm.forward_backward(function)])
        _, norm, _ = arm.optimizer.step()
        found.append(float(norm).hex())
        if activation is not None and SHARES:
            counts.append(activation.shares.plan.counts)
            settle(activation.shares)
        elif activation is not None:
            activation.session.iteration_done()
        arm.end()
    if SHARES:
        everyones = of_all_ranks(counts)
        assert all(one == counts for one in everyones), everyones
        return mean_losses(losses), " ".join(map(str, dict.fromkeys(counts)))
    if JOB.replicas == 1:  # else they stand where the last stage of their home has run
        found += [loss.hex() for each in losses for loss in each]
    run = None if activation is None else activation.session.run
    schedule = run.controller.ballot.schedule if run else None
    swapped = " swapped" if schedule and schedule.routes.moved else ""
    plan = f"{schedule.warmup}{swapped}" if schedule else "stock"
    return [*found, arm.digest(), states(arm)], plan


def settle(shares: Any) -> None:
    """Wait for what chooses counts, without a call of ours: that would be a site."""
    sync = shares._source
    if (loop := getattr(sync, "loop", None)) is not None:
        loop._queue.put(done := threading.Event())
        done.wait(SETTLED)


def calculate() -> None:
    """What replicas take follows from counts: the second one needs three times as long."""
    known = ScheduleTimes.known

    def knows(self: ScheduleTimes, iteration: int) -> Timed | None:
        timed, replica = known(self, iteration), mpu.get_data_parallel_rank()
        seconds = timed and (0.1, 0.3)[replica] * timed.counts[replica]
        return timed and timed._replace(seconds=seconds)

    ScheduleTimes.known = knows  # type: ignore[method-assign]


def adapted(dataset: Any, engine: str, log: Path) -> tuple[list[Any], str]:
    """The same with the plugin."""
    config = AdaptraConfig(
        engine=engine, recompute=engine == "executor" and JOB.replicas == 1, timeout=60.0,
        small_collectives="on", decision_log=str(log), **JOB.settings,
    )  # fmt: skip
    activation = activate(config)
    try:
        return train(dataset, activation)
    finally:
        activation.undo()


def same(found: list[Any], stock: list[Any]) -> bool:
    return bool(found == (pytest.approx(stock, rel=1e-5) if SHARES else stock))


def find(dataset: Any, stock: list[Any], folder: Path) -> None:
    for engine in JOB.engines:
        with Discovery() as seen:
            found, plan = adapted(dataset, engine, folder / f"{engine}.jsonl")
        calls = {json.dumps([s.caller, s.callee]): n for s, n in seen.calls.items()}
        answer = {
            "engine": engine, "calls": calls, "waits": sorted(seen.waits), "plan": plan,
            "same": same(found, stock),
        }  # fmt: skip
        say("FOUND " + json.dumps(answer))


def fail(case: dict[str, Any], dataset: Any, stock: list[Any], rank: int, log: Path) -> None:
    fault = Fault(Site(*case["site"]), case["kind"], case["first"][rank])
    began, spent = time.monotonic(), time.process_time()
    with fault if rank in case["ranks"] else contextlib.nullcontext():
        found, plan = adapted(dataset, case["engine"], log)
    answer = {
        "same": same(found, stock), "hits": fault.hits, "plan": plan,
        "seconds": round(time.monotonic() - began, 2),
        "cpu": round(time.process_time() - spent, 2),
    }  # fmt: skip
    say("END " + json.dumps(answer))


def main() -> None:
    job, rank = divmod(int(os.environ["RANK"]), JOB.ranks)
    jobs = int(os.environ["WORLD_SIZE"]) // JOB.ranks
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=300))
    store = dist.PrefixStore(f"job {job}", shared)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=JOB.ranks)
    folder = Path(sys.argv[2]) / f"job{job}"
    if rank == 0:
        gpt.write_dataset(None, folder / "data", limit=100_000)
    dist.barrier()
    gpt.initialize(SHAPE, timeout=60)
    dataset = gpt.build_dataset(folder / "data" / "text", SHAPE, 8 * JOB.iterations * JOB.replicas)
    stock, _ = train(dataset)
    calculate()
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
