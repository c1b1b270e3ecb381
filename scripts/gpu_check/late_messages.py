"""One rank of a check of `Late`: several messages at once over a link that is slow by a delay."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from gpu_check.rank_fixture import RankFixture
from gpu_check.slow_links import Late

TURNS = 5


def on_rank(fixture: RankFixture, seconds: float, counts: list[int]) -> dict[str, Any]:
    """Return, by number of messages at once, the median seconds until all of them are there."""
    slow = Late(seconds)  # before the process group binds torch's functions
    dist.init_process_group(
        "nccl", store=dist.PrefixStore("late", fixture.store), rank=fixture.rank,
        world_size=fixture.ranks,
    )  # fmt: skip
    try:
        slow.switch(False)
        _pass(fixture, 1, "first")  # connections
        well = [_typical(fixture, count, "well") for count in counts]
        slow.switch(True)
        late = [_typical(fixture, count, "late") for count in counts]
        slow.switch(False)
        healed = [_typical(fixture, count, "healed") for count in counts]
    finally:
        dist.destroy_process_group()
    return {"well": well, "late": late, "healed": healed}


def _typical(fixture: RankFixture, count: int, name: str) -> float:
    return median(_pass(fixture, count, f"{name} {count} {turn}") for turn in range(TURNS))


def _pass(fixture: RankFixture, count: int, name: str) -> float:
    """Send `count` messages from rank 0 to rank 1, one after the other, and wait for all."""
    data = [torch.zeros(64, dtype=torch.uint8, device=fixture.device) for _ in range(count)]
    way = dist.irecv if fixture.rank else dist.isend
    fixture.finish()
    fixture.together(name)
    begin = time.monotonic()
    works = [
        w for one in data for w in dist.batch_isend_irecv([dist.P2POp(way, one, 1 - fixture.rank)])
    ]
    for work in works:
        work.wait()
    fixture.finish()
    return time.monotonic() - begin
