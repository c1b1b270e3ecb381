"""A long training: what the control plane keeps is bounded."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading

import pytest
import torch.distributed as dist
from patience import PATIENCE
from runtime.leading import workers
from runtime.pipeline import schedule
from telemetry.records import record
from transport.loopback import LoopbackNetwork
from transport.ranks import Processes, RankFixture, until

from megatron_adaptra import waits
from megatron_adaptra.runtime.agreement import DecisionStore, starting_ballot
from megatron_adaptra.runtime.channel import Channel
from megatron_adaptra.runtime.controller import Member
from megatron_adaptra.runtime.decisions import DecisionLog
from megatron_adaptra.runtime.leader import Leader
from megatron_adaptra.runtime.replan_loop import ReplanLoop
from megatron_adaptra.runtime.replan_policy import ReplanPolicy
from megatron_adaptra.runtime.store import KeyValueStore
from megatron_adaptra.telemetry.estimate import Estimator

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
    network, store = LoopbackNetwork(), dist.HashStore()
    start, decisions = schedule((2, 1), COUNT), DecisionStore(KeyValueStore("", lambda: store))
    ends = [Channel(network.open(rank), 1 - rank) for rank in range(2)]
    estimator = Estimator(COUNT, ["one"] * 2, None, 1000)
    log = DecisionLog(None)
    loop = ReplanLoop(start, estimator, ReplanPolicy(), log, workers(2))
    leader = Leader(starting_ballot(start), {1: ends[0]}, decisions, loop)
    member = Member(starting_ballot(start), {0: ends[1]}, decisions, PATIENCE)
    found = []
    for iteration in range(iterations):
        delay = 0.05 if iteration % 1000 > 900 else 1e-4
        plans = []
        for stage, one in enumerate((leader, member)):
            plans.append(one.begin(iteration))
            one.report(record(stage, iteration, {1 - stage: delay}, count=COUNT))
        assert plans[0] == plans[1]
        if iteration % 16 == 0:  # no stage is far ahead of the planning, as in a real training
            until(lambda i=iteration: leader.status.get("iteration", 0) >= i - 1, "a report")
        if iteration in (SETTLED, iterations - 1):
            loop.drain(PATIENCE)  # a search under way holds memory, too
            gc.collect()
            if found:  # one that a busy machine has held up for seconds is replaced, and ends later
                most = found[0][1]
                until(lambda most=most: threading.active_count() <= most, "no thread more")
            found.append((in_use(), threading.active_count(), len(os.listdir("/proc/self/fd"))))
    assert log.in_force > iterations // 2000
    leader_closes = threading.Thread(target=leader.close)
    leader_closes.start()
    member.close()
    leader_closes.join(PATIENCE)
    return found


@pytest.mark.long
@pytest.mark.parametrize("iterations", [10_000, pytest.param(100_000, marks=pytest.mark.large)])
def test_a_long_training_takes_no_more_memory_threads_or_descriptors(iterations: int) -> None:
    with Processes(soak, iterations, ranks=1) as processes:
        ((held, pieces), *others), ((held_after, pieces_after), *others_after) = processes.result(0)
    assert held_after - held < MIB
    assert pieces_after - pieces < 10_000
    assert others_after == others
