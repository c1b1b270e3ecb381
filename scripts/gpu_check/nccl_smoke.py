"""One rank of part `nccl`: what real NCCL does between two ranks that share a GPU."""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from gpu_check import shared_nccl
from gpu_check.rank_fixture import RankFixture, pattern

TURNS = 5
SUMMED = 1 << 18  # values of the all-reduce
COMPUTE = 0.2  # seconds of kernels, alone and beside a peer's kernel that waits
TO_JOIN = timedelta(seconds=60)  # a lock between kernels shows early
# What NCCL's log says of the network it has taken.
NETWORK = re.compile(r"Using network (\S+)|via NET/(\S+)|(Duplicate GPU[^\n]*)")


def on_rank(fixture: RankFixture, sizes: list[int], spins: bool) -> dict[str, Any]:
    """Return what went over NCCL. `spins`: kernels take time here, and may be slowed by others."""
    shared_nccl.join(fixture.rank)
    log = fixture.folder / f"nccl-{fixture.rank}.log"
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(log)}
    dist.init_process_group(
        "nccl", store=dist.PrefixStore("smoke", fixture.store), rank=fixture.rank,
        world_size=fixture.ranks, timeout=TO_JOIN,
    )  # fmt: skip
    try:
        begin = time.monotonic()
        same = _all_reduce(fixture)
        joined = time.monotonic() - begin
        messages = [_messages(fixture, nbytes) for nbytes in sizes]
        beside = _beside(fixture) if spins else None
    finally:
        dist.destroy_process_group()
    text = log.read_text() if log.exists() else ""
    networks = {next(filter(None, found)) for found in NETWORK.findall(text)}
    return {"joined": joined, "sum": same, "messages": messages, "beside": beside,
            "networks": sorted(networks)}  # fmt: skip


def _all_reduce(fixture: RankFixture) -> bool:
    each = [torch.arange(SUMMED, dtype=torch.float32) * (rank + 1) for rank in range(fixture.ranks)]
    mine = each[fixture.rank].to(fixture.device)
    dist.all_reduce(mine)
    return torch.equal(mine.cpu(), sum(each, torch.zeros(SUMMED)))


def _messages(fixture: RankFixture, nbytes: int) -> dict[str, Any]:
    """Send a message each way, several times; count wrong ones, and take the median's seconds."""
    peer, took, wrong = 1 - fixture.rank, [], 0
    into = torch.empty(nbytes, dtype=torch.uint8, device=fixture.device)
    for turn in range(TURNS):
        mine = pattern(nbytes, 2 * turn + fixture.rank).to(fixture.device)
        fixture.finish()
        fixture.together(f"{nbytes} {turn}")
        begin = time.monotonic()
        ops = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, into, peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        fixture.finish()
        took.append(time.monotonic() - begin)
        wrong += not torch.equal(into.cpu(), pattern(nbytes, 2 * turn + peer))
    return {"bytes": nbytes, "seconds": median(took), "wrong": wrong}


def _beside(fixture: RankFixture) -> float | None:
    """Return how many times as long rank 0's kernels take while rank 1's waits for a message."""
    data, peer = torch.zeros(8, dtype=torch.uint8, device=fixture.device), 1 - fixture.rank
    fixture.calibrate()
    if fixture.rank:
        fixture.meet("alone")
        work = dist.batch_isend_irecv([dist.P2POp(dist.irecv, data, peer)])
        fixture.meet("spinning")
        work[0].wait()
        fixture.finish()
        return None
    alone = _computing(fixture)
    fixture.meet("alone")
    fixture.meet("spinning")
    beside = _computing(fixture)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, data, peer)]):
        work.wait()
    fixture.finish()
    return beside / alone


def _computing(fixture: RankFixture) -> float:
    begin, end = fixture.busy(COMPUTE)
    fixture.finish()
    return fixture.passed(end) - fixture.passed(begin)
