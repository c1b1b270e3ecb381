"""A long training: what the control plane keeps is bounded."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading

import pytest
from adapt.voted_ranks import VotedRanks
from agree.leading import workers
from agree.pipeline import schedule
from measure.records import record
from patience import PATIENCE
from transport.ranks import Processes, RankFixture, until

from megatron_adaptra.adapt.log import DecisionLog
from megatron_adaptra.adapt.loop import Loop
from megatron_adaptra.adapt.pipeline.remedy import PipelineRemedy
from megatron_adaptra.adapt.schedules.decisions import PlanDecision
from megatron_adaptra.adapt.schedules.policy import ReplanPolicy
from megatron_adaptra.agree.agreement import starting_ballot
from megatron_adaptra.base import waits
from megatron_adaptra.measure.estimate import Estimator

MIB = 1 << 20
COUNT = 4  # microbatches
SETTLED = 1000  # iterations


class MallInfo(ctypes.Structure):
    """What mallinfo2(3) returns."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost",
    )]  # fmt: skip


def in_use() -> tuple[int, int]:
    """Bytes that C and C++ hold; pieces of memory that Python holds, of a hundred bytes or so.

    Not the resident bytes: an allocator that finds no place of the right size takes a new one.
    """
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = MallInfo
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd, sys.getallocatedblocks()


def soak(me: RankFixture, iterations: int) -> list[tuple[tuple[int, int], int, int]]:
    """Memory in use, threads and descriptors of two ranks, after a thousand and at the end.

    A link is slow for a hundred iterations of every thousand, so that there are votes, too.
    """
    waits.HEARTBEAT = 0.05
    start, log = schedule((2, 1), COUNT), DecisionLog(PlanDecision, None)
    estimator = Estimator(COUNT, ["one"] * 2, None, 1000)
    ranks = VotedRanks(
        2, lambda: starting_ballot(start),
        lambda: Loop(
            PipelineRemedy(start, estimator, ReplanPolicy(), log, workers(2)), announce=None
        ),
    )  # fmt: skip
    leader, loop = ranks.leader, ranks.loop
    found = []
    for iteration in range(iterations):
        delay = 0.05 if iteration % 1000 > 900 else 1e-4
        ranks._begin(iteration)
        for stage, one in enumerate(ranks.controllers):
            one.report(record(stage, iteration, {1 - stage: delay}, count=COUNT))
        if iteration % 16 == 0:  # no stage is far ahead of the planning, as in a real training
            until(lambda i=iteration: leader.status.get("iteration", 0) >= i - 1, "a report")
        if iteration in (SETTLED, iterations - 1):
            loop.drain(PATIENCE)  # a search under way holds memory, too
            gc.collect()
            if found:  # one that a busy machine has held up for seconds is replaced, and ends later
                most = found[0][1]
                until(lambda most=most: threading.active_count() <= most, "no thread more")
            found.append((in_use(), threading.active_count(), len(os.listdir("/proc/self/fd"))))
    assert log.committed > iterations // 2000
    closes = threading.Thread(target=leader.close)
    closes.start()
    ranks.controllers[1].close()
    closes.join(PATIENCE)
    return found


@pytest.mark.long
@pytest.mark.parametrize("iterations", [4000, pytest.param(100_000, marks=pytest.mark.large)])
def test_a_long_training_takes_no_more_memory_threads_or_descriptors(iterations: int) -> None:
    with Processes(soak, iterations, ranks=1) as processes:
        ((held, pieces), *others), ((held_after, pieces_after), *others_after) = processes.result(0)
    assert held_after - held < MIB
    assert pieces_after - pieces < 10_000
    assert others_after == others
