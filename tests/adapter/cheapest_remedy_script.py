"""One rank of test_cheapest_remedy.py: 2 replicas of 2 stages, one of which is slow for a while.

Trains under stock Megatron first, then with `--adaptra-sync auto`, once for each way in which
cheaper remedies answer. What replicas take is not measured but follows from counts, on any machine.
What has been found is printed as JSON, by rank 0. Arguments: a folder; and, to have forwards wait
instead and all of it measured, `swap` or `auto`, the routes that are allowed.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from megatron_adaptra.adapter.baseline import cpu

cpu.install()

import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state as mpu  # noqa: E402
from paced import pace  # noqa: E402
from rank_of_job import begin, mean_losses, of_all_ranks, show  # noqa: E402

from megatron_adaptra.adapter.baseline import gpt  # noqa: E402
from megatron_adaptra.adapter.entry.activate import _active, activate  # noqa: E402
from megatron_adaptra.adapter.pipeline import status  # noqa: E402
from megatron_adaptra.adapter.sync import offers  # noqa: E402
from megatron_adaptra.adapter.sync.found_counts import FoundCountsSource  # noqa: E402
from megatron_adaptra.config import AdaptraConfig  # noqa: E402
from megatron_adaptra.runtime.offer import Offer  # noqa: E402
from megatron_adaptra.telemetry.replica_row import ReplicaRow  # noqa: E402

ROUTES = sys.argv[2] if len(sys.argv) > 2 else ""
# The first iteration of a slow replica, the one after it, and all.
FROM, TO, ITERATIONS = (10, 60, 90) if ROUTES else (4, 14, 24)
MICROBATCHES, SIZE = (8, 64) if ROUTES else (4, 16)
MICROBATCH, STEP = 0.1, 0.05  # seconds, calculated
SHAPE = gpt.GPTShape(
    stages=2, microbatches=MICROBATCHES, layers=2, hidden=SIZE, heads=2, seq_length=SIZE,
    dropout=0.0,
)  # fmt: skip
SLOW = 1  # a replica


def train(dataset: Any, activation: Any = None) -> dict[str, Any]:
    """The mean loss of each iteration, its counts, and whether replicas had one plan in it."""
    arm = gpt.Arm.build(SHAPE, dataset)
    function = gpt.forward_backward_function()
    losses, counts, together, shown, seconds = [], [], [], [], []
    for _ in range(ITERATIONS):
        began = time.monotonic()
        arm.begin()
        pairs = arm.forward_backward(function)
        if activation is not None:
            counts.append(activation.shares.plan.counts)
            run = activation.session.run
            together.append(run is not None and not run.abandoned)
            shown.append(status.summary(run))
        arm.optimizer.step()
        arm.end()
        seconds.append(round(time.monotonic() - began, 4))
        losses.append([float(loss) for loss in pairs])
    means = mean_losses(losses)
    return {
        "losses": means, "counts": counts, "together": together, "digest": arm.digest(),
        "seconds": seconds, "shown": shown,
    }  # fmt: skip


def calculate(slow: set[int]) -> None:
    """From now on what replicas take follows from counts; those in `slow` are slow."""
    ended = FoundCountsSource.ended

    def calculated(self: FoundCountsSource, row: ReplicaRow) -> None:
        now = slow if FROM <= row.iteration < TO else ()
        each = [
            MICROBATCH * (count + SHAPE.stages - 1) * (2 if one in now else 1)
            for one, count in enumerate(row.microbatches)
        ]
        self._sync._took[row.iteration] = max(each) + STEP
        ended(self, dataclasses.replace(row, seconds=tuple(each)))

    FoundCountsSource.ended = calculated  # type: ignore[method-assign]


def sleep(replica: int) -> None:
    """From now on forwards wait, in a slow replica twice as long."""
    forward = gpt._forward_step

    def slept(*args: Any, **kwargs: Any) -> Any:
        iteration = _active[0].session.iteration
        time.sleep(MICROBATCH / 2 * (2 if replica == SLOW and FROM <= iteration < TO else 1))
        return forward(*args, **kwargs)

    gpt._forward_step = slept


def answered(leaves: float) -> None:
    """From now on routes are expected to leave that share of an iteration."""
    real = offers._of_routes

    def of_routes(session: Any) -> Offer | None:
        real(session)  # which fails for nobody
        return Offer(0, leaves, standing=True)

    offers._of_routes = of_routes


def trained(folder: Path, dataset: Any, **settings: Any) -> dict[str, Any]:
    """What a training with the plugin has found; the same on all ranks is `same`."""
    log = str(folder / "decisions.jsonl")
    activation = activate(AdaptraConfig(sync="auto", timeout=60.0, decision_log=log, **settings))
    try:
        found = train(dataset, activation)
        found["planned"] = activation.session.context.replicas
    finally:
        activation.undo()
    rows = of_all_ranks([found["counts"], found["together"]])
    return {**found, "same": all(row == rows[0] for row in rows)}


def main() -> None:
    folder = Path(sys.argv[1])
    prefix = begin(folder)
    gpt.initialize(SHAPE, timeout=60)
    dataset = gpt.build_dataset(prefix, SHAPE, ITERATIONS * 8 * 4)
    if ROUTES:
        sleep(mpu.get_data_parallel_rank())
        engine = "executor" if ROUTES == "auto" else "native"
        found = trained(
            folder, dataset, reroute=ROUTES, engine=engine, allreduce="auto", record=str(folder)
        )
        show("FOUND", found)
        dist.destroy_process_group()
        return
    found = {"stock": train(dataset)}
    slow = {SLOW}
    calculate(slow)
    pace()
    answered(1.0)
    found["nothing cheaper"] = trained(folder, dataset)
    found["routes leave all"] = trained(folder, dataset, reroute="swap", allreduce="auto")
    answered(0.55)
    found["routes are enough"] = trained(folder, dataset, reroute="swap")
    slow.clear()
    found["nobody slow"] = trained(folder, dataset, reroute="swap")
    show("FOUND", found)
    dist.destroy_process_group()


main()
