"""Reduce-scatters and all-gathers by plan: their bits, several in flight, what is refused."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from execute.test_exchange import DTYPES, HALF, SOON, exchange_of, same, values_of
from patience import PATIENCE
from seeding import new_seed
from torch.distributed import ReduceOp
from transport.ranks import run

from megatron_adaptra.base import exits
from megatron_adaptra.base.errors import BadInput, Disagreement
from megatron_adaptra.ir.collective import CollectivePlan
from megatron_adaptra.plan.reductions.builders import (
    direct,
    direct_all_gather,
    direct_reduce_scatter,
    ring,
    ring_all_gather,
    ring_reduce_scatter,
)


def summed(values: torch.Tensor, shard: int, around: bool, average: bool) -> torch.Tensor:
    """A shard's sum in the order of ranks, rounded once, or `around` the ring, at each rank."""
    ranks, dtype = len(values), values.dtype
    wide = torch.float32 if dtype in HALF else dtype
    parts = values.view(ranks, ranks, -1)[:, shard].to(wide)
    order = [(shard + 1 + i) % ranks for i in range(ranks)] if around else list(range(ranks))
    total = parts[order[0]]
    for i, rank in enumerate(order[1:], 2):
        total = total + parts[rank]
        if i == ranks and average:
            total = total / ranks
        if around:
            total = total.to(dtype).to(wide)
    return total.to(dtype)


def shards(me, ranks, seed):
    """Both halves, by both builders, four in flight."""
    rng, exchange = random.Random(seed), exchange_of(me, ranks)
    flying = []
    for number in range(12):
        size, dtype = rng.choice((0, 1, 7, 100, 3001)), rng.choice(DTYPES)
        cut, around = rng.randint(1, 4), rng.random() < 0.5
        average = dtype.is_floating_point and rng.random() < 0.5
        values = torch.stack(values_of(ranks, ranks * size, dtype, rng.randrange(2**31)))
        mine, scatter = values[me.rank].clone(), number % 2 == 0
        if scatter:
            plan = (ring_reduce_scatter if around else direct_reduce_scatter)(ranks, cut)
            op = ReduceOp.AVG if average else ReduceOp.SUM
            right = summed(values, me.rank, around, average)
            work, part = exchange.start(mine, plan, op), mine.view(ranks, size)[me.rank]
        else:
            plan = (ring_all_gather if around else direct_all_gather)(ranks, cut)
            right = torch.cat([values[r].view(ranks, size)[r] for r in range(ranks)])
            work, part = exchange.start(mine, plan), mine
        flying.append((work, part, right, (plan.name, plan.goal, size, cut, dtype, average)))
        if len(flying) == 4:
            work, got, right, what = flying.pop(rng.randrange(4))
            work.wait()
            assert same(got, right), what
    for work, got, right, what in flying:
        work.wait()
        assert same(got, right), what
    me.meet()
    return True


@pytest.mark.parametrize(("kind", "ranks"), [("eager", 5), ("tcp", 2)])
def test_shards_have_the_bits_of_their_plan(kind, ranks):
    assert all(run(kind, shards, ranks, new_seed(), ranks=ranks))


def refusals(me, ranks):
    exchange = exchange_of(me, ranks)
    scatter, gather = direct_reduce_scatter(ranks), direct_all_gather(ranks)
    for tensor, plan, op, text in (
        (torch.ones(5), scatter, ReduceOp.SUM, "elements of a buffer in shards 5: "),
        (torch.ones(5), gather, ReduceOp.SUM, "shards 5: equal shards need a multiple of 2"),
        (torch.ones(4), gather, ReduceOp.AVG, "operation of an all-gather .*adds nothing"),
        (torch.ones(4, dtype=torch.int32), scatter, ReduceOp.AVG, "floats only"),
    ):
        with pytest.raises(BadInput, match=text):
            exchange.start(tensor, plan, op)
    exchange.start(torch.ones(4), scatter).wait()
    me.meet()
    return True


def test_what_is_not_handled_is_refused():
    assert all(run("eager", refusals, 2, ranks=2))


def differing(me, ranks):
    exchange = exchange_of(me, ranks)
    plan = ring(ranks) if me.rank else ring_reduce_scatter(ranks)
    with pytest.raises(Disagreement) as caught:
        exchange.start(torch.ones(4), plan)
    me.meet()
    return str(caught.value)


def test_another_goal_on_one_rank_is_found_on_all():
    texts = run("eager", differing, 2, ranks=2)
    assert len(set(texts)) == 1
    assert "collectives: reduce-scatter (sum) of 4 torch.float32 by ring" in texts[0]
    assert "; sum of 4 torch.float32 by ring" in texts[0]


class Held:
    """A transport whose sends leave once `go` is set, and are over then."""

    def __init__(self, transport, go) -> None:
        self._transport, self._go, self.waited = transport, go, threading.Event()

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def isend(self, buffer, peer, tag):
        return HeldSend(self, buffer, peer, tag)


class HeldSend:
    def __init__(self, held, buffer, peer, tag) -> None:
        self._held, self._message = held, (buffer, peer, tag)

    def wait(self, timeout):
        self._held.waited.set()
        assert self._held._go.wait(PATIENCE)
        return self._held._transport.isend(*self._message).wait(timeout)


def ends_before_it_has_left(me, build, process_ends):
    """Rank 0 has its result, and uses the buffer again, before anything that it sends leaves.

    `process_ends`: then, with nothing closed.
    """
    exchange, plan = exchange_of(me, 2, SOON), build(2, 2)
    exchange.start(torch.ones(8), plan).wait()
    go, mine = threading.Event(), torch.arange(8.0) + 10 * me.rank
    if me.rank == 0:
        held = exchange.transport = Held(exchange.transport, go)
    work = exchange.start(mine, plan)
    if me.rank == 0:
        work.wait()
        got = mine.tolist()
        mine.fill_(-1.0)
        assert held.waited.wait(PATIENCE)
        assert not work.left.is_set()
        threading.Timer(0.05, go.set).start()
        left = []
        if process_ends:
            exits.at_exit(held, lambda _: left.append(work.left.is_set()))  # as connections do
            exits._end_process()
        else:
            exchange.close()
            left.append(work.left.is_set())
        assert left == [True]
        me.meet()
        return got
    work.wait()
    me.meet()
    return mine.tolist()


def owned_by_rank_0(ranks: int, pieces: int) -> CollectivePlan:
    """An all-reduce in which rank 0 has all sums before anything that it sends is needed."""
    return direct((1, *[0] * (ranks - 1)), pieces)


@pytest.mark.parametrize("process_ends", [False, True])
@pytest.mark.parametrize("build", [direct_reduce_scatter, direct_all_gather, owned_by_rank_0])
def test_a_rank_that_has_its_result_waits_for_nobody_to_confirm(build, process_ends):
    first, second = run("eager", ends_before_it_has_left, build, process_ends)
    if build is owned_by_rank_0:
        assert first == second == [10.0 + 2 * one for one in range(8)]
    elif build is direct_all_gather:
        assert first == second == [0.0, 1.0, 2.0, 3.0, 14.0, 15.0, 16.0, 17.0]
    else:
        assert first[:4] == [10.0, 12.0, 14.0, 16.0]
        assert second[4:] == [18.0, 20.0, 22.0, 24.0]
