"""One rank of test_faulty_counts.py: 2 replicas of one stage, one of which is slow.

Trains under stock Megatron first, then with counts that are found, also while a batch size ramps
up, then with emulated slow ops, and then under one fault after the other in what finds counts, at
each rank that calls it. Arguments: a folder; `every`, or `one` of the ways to fail for each call.
Prints what all ranks have found, as JSON.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_adaptra.adapter.baseline import cpu

cpu.install()

import pytest  # noqa: E402
import torch.distributed as dist  # noqa: E402
from paced import pace  # noqa: E402
from rank_of_job import begin, of_all_ranks, show  # noqa: E402

from megatron_adaptra import waits  # noqa: E402
from megatron_adaptra.adapter.baseline import gpt  # noqa: E402
from megatron_adaptra.adapter.entry.activate import activate  # noqa: E402
from megatron_adaptra.adapter.sync.found_counts import FoundCounts, FoundCountsSource  # noqa: E402
from megatron_adaptra.adapter.sync.share_times import ScheduleTimes  # noqa: E402
from megatron_adaptra.config import AdaptraConfig  # noqa: E402
from megatron_adaptra.runtime.sync import loop  # noqa: E402
from megatron_adaptra.runtime.sync.counts_vote import CountsVote  # noqa: E402
from megatron_adaptra.runtime.sync.decisions import SyncLog  # noqa: E402
from megatron_adaptra.runtime.sync.group import AdaptiveSync  # noqa: E402
from megatron_adaptra.runtime.sync.loop import SyncLoop  # noqa: E402
from megatron_adaptra.runtime.yielding import Yielding  # noqa: E402
from megatron_adaptra.telemetry.replica_row import ReplicaRow  # noqa: E402
from megatron_adaptra.telemetry.replica_speed import ReplicaSpeeds  # noqa: E402

ITERATIONS, SLOW = 14, 1  # a replica
MORE = 6  # microbatches, in place of 4
SHAPE = gpt.GPTShape(
    stages=1, microbatches=4, layers=1, hidden=16, heads=2, seq_length=16, dropout=0.0
)
SITES: dict[str, tuple[Any, str]] = {
    "made": (FoundCounts, "__call__"), "begin": (FoundCountsSource, "begin"),
    "ended": (FoundCountsSource, "ended"), "close": (FoundCounts, "close"),
    "gives": (FoundCountsSource, "gives"), "known": (ScheduleTimes, "known"),
    "moment": (AdaptiveSync, "_take_moment"), "taken": (AdaptiveSync, "_take_row"),
    "host": (Yielding, "ended"), "proposed": (CountsVote, "take"), "closed": (CountsVote, "begin"),
    "runs": (SyncLoop, "runs"), "row": (SyncLoop, "_on_row"),
    "speeds": (ReplicaSpeeds, "update"), "expected": (ReplicaSpeeds, "speeds"),
    "counts": (loop, "share_by_speed"), "remedies": (loop, "cheaper_remedies"),
    "logged": (SyncLog, "add"), "vote over": (SyncLog, "close_vote"),
}  # fmt: skip
AT_ALL = (
    "made", "begin", "ended", "close", "gives", "known", "moment", "taken", "host", "proposed",
)  # fmt: skip
OFF_THE_TRAINING_THREAD = ("host", "row", "speeds", "counts", "logged")


Fault = Callable[..., Any]


def raising(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("planted")


def nonsense(*args: Any, **kwargs: Any) -> Any:
    return "planted"


def hanging(*args: Any, **kwargs: Any) -> Any:
    RELEASED.wait()


RELEASED = threading.Event()


def train(dataset: Any, activation: Any = None, more: int = ITERATIONS) -> dict[str, Any]:
    """Losses and counts of all iterations; from iteration `more` on there are more microbatches."""
    arm, function = gpt.Arm.build(SHAPE, dataset), gpt.forward_backward_function()
    losses, counts = [], []
    for iteration in range(ITERATIONS + (ITERATIONS if more < ITERATIONS else 0)):
        if iteration == more:
            arm.shape = dataclasses.replace(SHAPE, microbatches=MORE)
        arm.begin()
        mine = [float(loss) for loss in arm.forward_backward(function)]
        if activation is not None and activation.shares is not None:
            counts.append(activation.shares.plan.counts)
        arm.optimizer.step()
        arm.end()
        everyones = [one for row in of_all_ranks(mine) for one in row]
        losses.append(sum(everyones) / len(everyones))
    return {"losses": losses, "counts": counts}


def calculate() -> None:
    """Times follow from counts: the second replica takes three times as long.

    Threads wait for a core all the time.
    """
    ended = FoundCountsSource.ended

    def calculated(self: FoundCountsSource, row: ReplicaRow) -> None:
        self._sync._took[row.iteration] = self._sync._queued[row.iteration] = 1.25
        one, other = row.microbatches
        ended(self, dataclasses.replace(row, seconds=(0.1 * one, 0.3 * other)))

    FoundCountsSource.ended = calculated  # type: ignore[method-assign]


def shares(dataset: Any) -> dict[str, Any]:
    """A training with counts that are found."""
    activation = activate(AdaptraConfig(sync="share", timeout=60.0))
    try:
        return train(dataset, activation)
    finally:
        activation.undo()


def sound(dataset: Any) -> dict[str, Any]:
    """The same, and all sites that this rank has called."""
    called = set[str]()

    def noting(site: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            called.add(site)
            return function(*args, **kwargs)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for site, (owner, name) in SITES.items():
            patch.setattr(owner, name, noting(site, getattr(owner, name)))
        found = shares(dataset)
    return {**found, "called": sorted(called)}


def faulty(dataset: Any, site: str, what: Fault | None) -> dict[str, Any]:
    """A training with the fault, if any, at this rank, and whether it has met it."""
    met = list[bool]()

    def failing(*args: Any, **kwargs: Any) -> Any:
        met.append(True)
        return what(*args, **kwargs)

    RELEASED.clear()
    with pytest.MonkeyPatch.context() as patch:
        if what is not None:
            patch.setattr(*SITES[site], failing)
        if what is hanging:  # it never ends before
            patch.setattr(waits, "END", 0.2)
        try:
            return {**shares(dataset), "met": bool(met)}
        finally:
            RELEASED.set()


def ramped(dataset: Any) -> dict[str, Any]:
    """A training in which the batch size ramps up when replicas share out iterations."""
    activation = activate(AdaptraConfig(sync="share", timeout=60.0))
    try:
        return train(dataset, activation, ITERATIONS - 1)
    finally:
        activation.undo()


def emulated(dataset: Any) -> list[tuple[int, float]]:
    """For each op of this rank, in which iteration it ran, and how much longer it had to take."""
    activation = activate(AdaptraConfig(emulate_worker=[f"{SLOW}.0:3x@2.."]))
    emulator, waits = activation.session.context.worker_emulator, []
    emulator.wait = lambda _, kind: waits.append((emulator.iteration, emulator.seconds(1.0, kind)))
    try:
        train(dataset, activation)
    finally:
        activation.undo()
    return waits


def faults() -> Iterator[tuple[int, str, Fault]]:
    """Rank, site, and way."""
    for where in range(2):
        for site in SITES:
            if where and site not in AT_ALL:
                continue
            ways = [raising, nonsense, *([hanging] if site in OFF_THE_TRAINING_THREAD else [])]
            yield from ((where, site, what) for what in ways)


def main() -> None:
    for name, seconds in (("END", 1.0), ("CLOSE", 0.5), ("POLL", 0.1)):
        setattr(waits, name, seconds)
    prefix = begin(Path(sys.argv[1]))
    gpt.initialize(SHAPE, timeout=60)
    dataset = gpt.build_dataset(prefix, SHAPE, 3 * ITERATIONS * 8)
    show("STOCK", train(dataset)["losses"])
    calculate()
    hasty = FoundCountsSource.begin
    pace()
    show("SOUND", of_all_ranks(sound(dataset)))
    show("RAMPED", of_all_ranks(ramped(dataset)))
    FoundCountsSource.begin = hasty  # type: ignore[method-assign]
    show("EMULATED", of_all_ranks(emulated(dataset)))
    for where, site, what in faults():
        found = faulty(dataset, site, what if dist.get_rank() == where else None)
        row = {"rank": where, "site": site, "what": what.__name__, "ranks": of_all_ranks(found)}
        show("FAULT", row)
    dist.destroy_process_group()


main()
