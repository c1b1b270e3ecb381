"""Bodies of two ranks: what torch.distributed fills, as it is and staged through the host."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from gpu_check.host_staged import host_staged
from transport.ranks import RankFixture

Results = list[torch.Tensor]


def collectives(asynchronous: bool) -> Results:
    """One of each, in and out of views as Megatron does it."""
    rank = dist.get_rank()
    mine = torch.arange(4.0) + 10 * rank
    reduced, sent, large = mine.clone(), mine.clone(), torch.zeros(8)
    gathered = [torch.zeros(4), torch.zeros(4)]
    own = large.chunk(2)[rank]
    own.copy_(mine)
    scattered, swapped = torch.arange(8.0) * (rank + 1), torch.zeros(4)
    works = [
        dist.all_reduce(reduced, async_op=asynchronous),
        dist.broadcast(sent, src=1, async_op=asynchronous),
        dist.all_gather(gathered, mine, async_op=asynchronous),
        dist.all_gather_into_tensor(large, own, async_op=asynchronous),
        dist.reduce_scatter_tensor(
            scattered.chunk(2)[rank], scattered.clone(), async_op=asynchronous
        ),
        dist.all_to_all_single(swapped, mine, async_op=asynchronous),
    ]
    for work in works:
        assert (work is not None) is asynchronous
        if work is not None:
            work.wait()
    return [reduced, sent, *gathered, large, scattered.chunk(2)[rank], swapped]


def messages() -> Results:
    other, got = 1 - dist.get_rank(), torch.zeros(3, 2)
    given = torch.full((3, 2), float(other))
    ops = [dist.P2POp(dist.isend, given, other), dist.P2POp(dist.irecv, got, other)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    more = torch.zeros(2, 3)
    works = [dist.irecv(more, src=other), dist.isend(given.t().contiguous(), dst=other)]
    for work in works:
        work.wait()
    return [got, more]


def coalesced(asynchronous: bool) -> Results:
    buckets = [torch.arange(4.0) + i + dist.get_rank() for i in range(3)]
    with dist._coalescing_manager(async_ops=asynchronous) as handle:
        for bucket in buckets:
            dist.all_reduce(bucket, async_op=asynchronous)
    if asynchronous:
        handle.wait()
    return buckets


def everything() -> Results:
    calls: list[Callable[[], Results]] = [messages]
    for asynchronous in (False, True):
        calls.append(lambda a=asynchronous: collectives(a))
        calls.append(lambda a=asynchronous: coalesced(a))
    return [tensor for call in calls for tensor in call()]


def compared(me: RankFixture) -> bool:
    original = dist.all_reduce
    plain = everything()
    with host_staged(everything=True):
        assert dist.all_reduce is not original
        staged = everything()
    assert dist.all_reduce is original
    assert len(plain) == len(staged)
    for number, (one, two) in enumerate(zip(plain, staged, strict=True)):
        assert torch.equal(one, two), (number, one, two)
    return True
