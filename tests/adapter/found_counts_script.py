"""One rank of test_found_counts.py: 4 ranks in replicas, the last of which is slow for a while.

Trains under stock Megatron first, then with shares of microbatches that are found. What has been
found is printed as JSON, by rank 0. Arguments: a folder, the stages of a replica, and how one is
slow: `calculated`, where seconds are not measured but follow from counts, on any machine; `slept`,
where each forward waits besides; `emulated`, where ops wait as long as they compute.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from megatron_adaptra.adapter.baseline import cpu

cpu.install()

import pytest  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state as mpu  # noqa: E402
from paced import pace  # noqa: E402
from rank_of_job import begin, mean_losses, of_all_ranks, show  # noqa: E402

from megatron_adaptra.adapter.baseline import gpt  # noqa: E402
from megatron_adaptra.adapter.entry.activate import activate  # noqa: E402
from megatron_adaptra.adapter.sync.found_counts import FoundCountsSource  # noqa: E402
from megatron_adaptra.adapter.sync.share_times import ScheduleTimes, Timed  # noqa: E402
from megatron_adaptra.config import AdaptraConfig  # noqa: E402
from megatron_adaptra.ir.sync import SyncPlan  # noqa: E402
from megatron_adaptra.runtime.sync.share_vote import ShareVote  # noqa: E402
from megatron_adaptra.telemetry.replica_row import ReplicaRow  # noqa: E402

FROM, TO = 4, 14  # the first iteration in which a replica is slow, the one after it
BEHIND = 2  # a rank that does not switch with the others, in the last training
ITERATIONS = 24
MICROBATCH, STEP = 0.1, 0.05  # seconds, where they are calculated
STAGES = int(sys.argv[2])
SHAPE = gpt.GPTShape(
    stages=STAGES, microbatches=4, layers=2, hidden=16, heads=2, seq_length=16, dropout=0.0
)
SLOW = 4 // STAGES - 1  # a replica


def train(dataset: Any, activation: Any = None, iterations: int = ITERATIONS) -> dict[str, Any]:
    """The mean loss, the counts and the seconds of each iteration; in which order ends are."""
    arm = gpt.Arm.build(SHAPE, dataset)
    function = gpt.forward_backward_function()
    order = notes_ends(arm)
    losses, counts, seconds = [], [], []
    for _ in range(iterations):
        began = time.monotonic()
        arm.begin()
        pairs = arm.forward_backward(function)
        if activation is not None:
            counts.append(activation.shares.plan.counts)
        arm.optimizer.step()
        arm.end()
        seconds.append(time.monotonic() - began)
        losses.append([float(loss) for loss in pairs])
    means = mean_losses(losses)
    return {
        "losses": means, "counts": counts, "seconds": seconds, "digest": arm.digest(),
        "order": list(order),
    }  # fmt: skip


def notes_ends(arm: Any) -> list[str]:
    """Gets in their order `start` of an iteration, `vote` on shares, and `reduce`.

    The last one is when gradients begin to be finalised.
    """
    order, finalize = list[str](), arm.config.finalize_model_grads_func
    start, starts = ShareVote.start, FoundCountsSource.starts

    def noted(word: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            order.append(word)
            return function(*args, **kwargs)

        return run

    arm.config.finalize_model_grads_func = noted("reduce", finalize)
    ShareVote.start = noted("vote", start)  # type: ignore[method-assign]
    FoundCountsSource.starts = noted("start", starts)  # type: ignore[method-assign]
    return order


def calculate(replica: int) -> None:
    """From now on what replicas take follows from counts, and each rank puts that into its vote."""
    known, ended = ScheduleTimes.known, FoundCountsSource.ended

    def calculated(iteration: int, counts: tuple[int, ...]) -> list[float]:
        slow = SLOW if FROM <= iteration < TO else None
        each = enumerate(counts)
        return [MICROBATCH * (n + STAGES - 1) * (2 if one == slow else 1) for one, n in each]

    def knows(self: ScheduleTimes, iteration: int) -> Timed | None:
        timed = known(self, iteration)
        assert timed is not None
        assert timed.seconds > 0
        return timed._replace(seconds=calculated(iteration, timed.counts)[replica])

    def ends(self: FoundCountsSource, row: ReplicaRow) -> None:
        expected = calculated(row.iteration, row.microbatches)
        assert row.seconds == pytest.approx(expected), "on all ranks"
        self._sync._took[row.iteration] = max(row.seconds) + STEP
        ended(self, row)

    ScheduleTimes.known = knows  # type: ignore[method-assign]
    FoundCountsSource.ended = ends  # type: ignore[method-assign]


def sleep(replica: int, activation: Any) -> None:
    """From now on forwards of a replica take as long on any machine, or twice as long."""
    forward = gpt._forward_step

    def slept(*args: Any, **kwargs: Any) -> Any:
        slow = replica == SLOW and FROM <= activation.shares._iteration < TO
        time.sleep(MICROBATCH / 2 * (2 if slow else 1))
        return forward(*args, **kwargs)

    gpt._forward_step = slept


def stay_behind() -> None:
    """From now on this rank goes on as before when others switch."""
    begin = FoundCountsSource.begin

    def stays(self: FoundCountsSource, iteration: int, voted: Any) -> SyncPlan:
        plan = begin(self, iteration, voted)
        return SyncPlan.full_of(plan.replicas, plan.microbatches)

    FoundCountsSource.begin = stays  # type: ignore[method-assign]


def shares(
    settings: AdaptraConfig, dataset: Any, sleeps: bool = False, iterations: int = ITERATIONS
) -> dict[str, Any]:
    """What a training with the plugin has found."""
    activation = activate(settings)
    if sleeps:
        sleep(mpu.get_data_parallel_rank(), activation)
    try:
        return train(dataset, activation, iterations)
    finally:
        activation.undo()


def main() -> None:
    folder, how = Path(sys.argv[1]), sys.argv[3]
    prefix = begin(folder)
    gpt.initialize(SHAPE, timeout=60)
    dataset = gpt.build_dataset(prefix, SHAPE, ITERATIONS * 8 * 4)
    stock = train(dataset)
    emulated = [f"{SLOW}.0:2x@{FROM}..{TO}"] if how == "emulated" else []
    files = {"decision_log": str(folder / "decisions.jsonl"), "record": str(folder / "record")}
    settings = AdaptraConfig(sync="share", timeout=60.0, emulate_worker=emulated, **files)
    replica = mpu.get_data_parallel_rank()
    if how == "calculated":
        calculate(replica)
        pace()
    shared = shares(settings, dataset, how == "slept")
    rows = of_all_ranks(shared["counts"])
    same = all(row == rows[0] for row in rows)
    found = {"stock": stock, "shared": shared, "same": same}
    if how == "calculated":
        if dist.get_rank() == BEHIND:
            stay_behind()
        found["behind"] = of_all_ranks(shares(settings, dataset, iterations=TO))
    show("FOUND", found)
    dist.destroy_process_group()


main()
