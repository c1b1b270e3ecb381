"""One rank of test_found_counts.py: 2 replicas of 2 stages, one of which is slow for a while.

Trains under stock Megatron first, then with shares of microbatches that are found: by themselves,
beside routes that help or do not, and with a rank that does not switch. What replicas take is not
measured but follows from counts, on any machine. What has been found is printed as JSON, by rank 0.
Argument: a folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron_adaptra.adapter.baseline import cpu

cpu.install()

import pytest  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state as mpu  # noqa: E402
from paced import pace  # noqa: E402
from rank_of_job import begin, mean_losses, of_all_ranks, show  # noqa: E402

from megatron_adaptra.adapt.loop import Offer  # noqa: E402
from megatron_adaptra.adapter.baseline import gpt  # noqa: E402
from megatron_adaptra.adapter.entry import training_log  # noqa: E402
from megatron_adaptra.adapter.entry.activate import activate  # noqa: E402
from megatron_adaptra.adapter.shares import sources  # noqa: E402
from megatron_adaptra.adapter.shares.share_times import ScheduleTimes, Timed  # noqa: E402
from megatron_adaptra.agree.share_vote import ShareVote  # noqa: E402
from megatron_adaptra.config import AdaptraConfig  # noqa: E402
from megatron_adaptra.execute.shares.adaptive import AdaptiveShares  # noqa: E402
from megatron_adaptra.ir.sync import SyncPlan  # noqa: E402
from megatron_adaptra.measure.replica_speed import ReplicaRow  # noqa: E402

FROM, TO = 4, 14  # the first iteration in which a replica is slow, the one after it
BEHIND = 2  # a rank that does not switch with the others, in the last training
ITERATIONS, SLOW = 24, 1  # a replica
MICROBATCH, STEP = 0.1, 0.05  # seconds, calculated
SHAPE = gpt.GPTShape(
    stages=2, microbatches=4, layers=2, hidden=16, heads=2, seq_length=16, dropout=0.0
)


def train(dataset: Any, activation: Any = None, iterations: int = ITERATIONS) -> dict[str, Any]:
    """The mean loss of each iteration; with the plugin its counts, whether replicas had one plan in
    it, and what Megatron's log shows; in which order ends are."""
    arm, function = gpt.Arm.build(SHAPE, dataset), gpt.forward_backward_function()
    order = list[str]()
    arm.config.finalize_model_grads_func = noted(
        order, "reduce", arm.config.finalize_model_grads_func
    )
    losses, counts, together, shown = [], [], [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShareVote, "start", noted(order, "vote", ShareVote.start))
        starts = noted(order, "start", AdaptiveShares.starts)
        patch.setattr(AdaptiveShares, "starts", starts)
        for _ in range(iterations):
            arm.begin()
            pairs = arm.forward_backward(function)
            if activation is not None:
                counts.append(activation.shares.plan.counts)
                run = activation.session.run
                together.append(run is not None and not run.abandoned)
                shown.append(training_log.summary(run))
            arm.optimizer.step()
            arm.end()
            losses.append([float(loss) for loss in pairs])
    rows = of_all_ranks([counts, together])
    return {
        "losses": mean_losses(losses), "counts": counts, "together": together, "shown": shown,
        "digest": arm.digest(), "order": order, "same": all(row == rows[0] for row in rows),
    }  # fmt: skip


def noted(order: list[str], word: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same `function`, whose calls come into `order` as `word`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        order.append(word)
        return function(*args, **kwargs)

    return run


def calculate(replica: int) -> None:
    """From now on what replicas take follows from counts, and each rank puts that into its vote."""
    known, ended = ScheduleTimes.known, AdaptiveShares.ended

    def calculated(iteration: int, counts: tuple[int, ...]) -> list[float]:
        slow = SLOW if FROM <= iteration < TO else None
        each = enumerate(counts)
        return [MICROBATCH * (n + SHAPE.stages - 1) * (2 if one == slow else 1) for one, n in each]

    def knows(self: ScheduleTimes, iteration: int) -> Timed | None:
        timed = known(self, iteration)
        assert timed is not None
        assert timed.seconds > 0
        return timed._replace(seconds=calculated(iteration, timed.counts)[replica])

    def ends(self: AdaptiveShares, row: ReplicaRow) -> None:
        expected = calculated(row.iteration, row.microbatches)
        assert row.seconds == pytest.approx(expected), "on all ranks"
        self._took[row.iteration] = max(row.seconds) + STEP
        ended(self, row)

    ScheduleTimes.known = knows  # type: ignore[method-assign]
    AdaptiveShares.ended = ends  # type: ignore[method-assign]


def answered(leaves: float) -> None:
    """From now on routes are expected to leave that share of an iteration."""
    real = sources._of_routes

    def of_routes(session: Any) -> Offer | None:
        real(session)  # which fails for nobody
        return Offer(0, leaves, standing=True)

    sources._of_routes = of_routes


def stay_behind() -> None:
    """From now on this rank goes on as before when others switch."""
    begin = AdaptiveShares.begin

    def stays(self: AdaptiveShares, iteration: int, voted: Any, microbatches: int) -> SyncPlan:
        plan = begin(self, iteration, voted, microbatches)
        return SyncPlan.full_of(plan.replicas, plan.microbatches)

    AdaptiveShares.begin = stays  # type: ignore[method-assign]


def shares(
    folder: Path, dataset: Any, name: str, iterations: int = ITERATIONS, **settings: Any
) -> dict[str, Any]:
    """What a training with the plugin has found, whose files have this `name`."""
    files = {"decision_log": str(folder / f"{name}.jsonl"), "record": str(folder / name)}
    activation = activate(AdaptraConfig(timeout=60.0, **files, **settings))
    try:
        found = train(dataset, activation, iterations)
        return {**found, "planned": activation.session.context.replicas}
    finally:
        activation.undo()


def main() -> None:
    folder = Path(sys.argv[1])
    prefix = begin(folder)
    gpt.initialize(SHAPE, timeout=60)
    dataset = gpt.build_dataset(prefix, SHAPE, ITERATIONS * 8 * 4)
    found = {"stock": train(dataset)}
    calculate(mpu.get_data_parallel_rank())
    pace()
    ours = partial(shares, folder, dataset)
    found["shared"] = ours("shared", sync="share")
    answered(1.0)
    found["routes leave all"] = ours("left", sync="auto", reroute="swap", allreduce="auto")
    answered(0.55)
    found["routes are enough"] = ours("enough", sync="auto", reroute="swap")
    if dist.get_rank() == BEHIND:
        stay_behind()
    found["behind"] = of_all_ranks(ours("behind", TO, sync="share"))
    show("FOUND", found)
    dist.destroy_process_group()


main()
