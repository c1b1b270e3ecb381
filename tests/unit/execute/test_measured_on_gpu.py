"""Reductions that stay on GPUs: who comes late is found out, and what a plan would save, no more.

Marks have moments that are made up, on the clock of all ranks: a second there is none here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from patience import PATIENCE
from transport.ranks import RankFixture, run, until

from megatron_adaptra.adapt.leader import Leader
from megatron_adaptra.adapt.loop import Loop
from megatron_adaptra.adapt.reductions.remedy import ReductionRemedy
from megatron_adaptra.device.base import HostDevice
from megatron_adaptra.execute.planned.connected import Connected
from megatron_adaptra.execute.planned.measured import MESHES, MeasuredReductions

RANKS, WHOLE, ITERATION, TAKES, LATE = 4, 4_000_000, 200.0, 60.0, 40.0
FROM, TO, ITERATIONS = 8, 20, 34
LATER = 2  # iterations, after which one is known of all ranks
SOON = 12  # iterations, in which a change is named: see test_all_reduce_loop.py, and LATER


@dataclass
class Moment:
    """`moment`: None for one that is never known."""

    moment: float | None
    recorded: float = 0.0
    fault: str = ""

    def at(self) -> float | None:
        return self.moment


@dataclass
class Gpu(HostDevice):
    """Marks are made at `now`."""

    now: float | None = 0.0
    name: str = "cuda:0"
    behind: bool = True
    anchors: list[float | None] = field(default_factory=list)

    def mark(self) -> Any:
        return Moment(self.now)

    def anchor(self) -> None:
        self.anchors.append(self.now)


def knows(loop: Loop[ReductionRemedy], iteration: int) -> bool:
    return loop.seen >= iteration


def train(
    me: RankFixture, sharded: bool, overlaps: bool, unknown: bool
) -> tuple[int, list[tuple[int, str]]]:
    """How many reductions are known of all ranks, and what was logged in which iteration.

    Rank 2 is LATE in some of them. Nothing is known of a rank's last iteration, and of the one
    before no message has come. `unknown`: a rank's GPU has not passed its marks in the third one.
    """
    world = dist.group.WORLD
    assert world is not None
    gpu, notes = Gpu(), list[tuple[int, str]]()
    connected = Connected.between(world, "observed", PATIENCE, "engine", meshes=MESHES[:-1])
    observed = MeasuredReductions(
        connected, me.rank, tuple(range(8, 8 + RANKS)), 0.02, PATIENCE, None, sharded, overlaps,
        gpu, "nccl",
    )  # fmt: skip
    controller, loop = observed._controller, observed.loop
    iteration = 0
    if isinstance(controller, Leader):
        controller.note = lambda text: notes.append((iteration, text))  # type: ignore[method-assign]
    for iteration in range(ITERATIONS):
        late = LATE if FROM <= iteration < TO else 0.0
        begins = iteration * ITERATION
        mine = late if me.rank == 2 else 0.0
        gpu.now = begins + mine
        assert observed.ready().plan is None
        for part in range(4):
            gpu.now = None if unknown and iteration == 2 else begins + mine + part * overlaps
            observed.started(WHOLE // 4)
        gpu.now = begins + late + 3 * overlaps + TAKES
        for _ in range(4):
            observed.ended()
        if loop is not None and iteration > LATER and not (unknown and iteration - LATER == 2):
            until(partial(knows, loop, iteration - LATER), f"iteration {iteration}")
            offer = loop.remedy.offer
            assert offer is None or offer.leaves == 1, "nothing will be done"
        me.meet()
    assert len(gpu.anchors) == ITERATIONS
    seen = -1 if loop is None else loop.seen
    me.meet()
    observed.close()
    return seen, notes


@pytest.mark.parametrize(
    ("sharded", "overlaps", "unknown"),
    [(False, False, True), (False, True, False), (True, True, True)],
)
def test_a_late_rank_is_named_with_what_a_plan_would_save(
    sharded: bool, overlaps: bool, unknown: bool
) -> None:
    (seen, notes), *others = run("gloo", train, sharded, overlaps, unknown, ranks=RANKS)
    assert seen == ITERATIONS - 1 - LATER
    assert all(not words for _, words in others)
    (found, late), (back, in_time) = notes
    assert FROM < found <= FROM + SOON
    assert TO < back <= TO + SOON
    start = "gradients of ranks 8 to 11 stay with nccl: rank 10 comes "
    named = re.match(rf"{start}(\d+) ms late; ", late)
    assert named is not None, late
    assert int(named[1]) == pytest.approx(1e3 * LATE, rel=0.05)
    if sharded:
        assert late.endswith("no other reduction would help: of shards none can")
    elif overlaps:
        assert late.endswith("stragglar, late rank 2 would save about 10 % of an iteration")
    else:  # of four buffers, one after another, it is late for the first one alone
        assert late.endswith("no other reduction would help: none would save enough")
    assert in_time.startswith(f"{start}in time; no other reduction would help: ")
