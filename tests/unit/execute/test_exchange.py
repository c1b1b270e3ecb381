"""All-reduces by plan: their bits, several in flight, ranks that die, plans that differ."""

from __future__ import annotations

import contextlib
import random
import threading
from functools import partial

import pytest
import torch
from patience import PATIENCE
from seeding import new_seed
from torch.distributed import ReduceOp
from transport.ranks import Processes, run, until

from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import BadInput, Disagreement, PeerLost
from megatron_adaptra.execute.planned import exchange as exchange_module
from megatron_adaptra.execute.planned.exchange import Exchange
from megatron_adaptra.ir.collective import Action, CollectivePlan
from megatron_adaptra.plan.reductions.builders import (
    direct,
    halving_doubling,
    ring,
    shares_without,
    sorted_chain,
)

HALF = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, torch.float64, *HALF, torch.int32, torch.int64)
SOON = 12.0  # seconds; a third is for ranks of a busy machine to answer each other


def plans_of(ranks: int, rng: random.Random) -> list[CollectivePlan]:
    """One of each builder."""
    late = rng.sample(range(ranks), rng.randrange(ranks))
    return [
        ring(ranks, rng.randint(1, 3)),
        halving_doubling(ranks),
        sorted_chain(rng.sample(range(ranks), ranks), rng.randint(1, 5)),
        direct(shares_without(ranks, late), rng.randint(1, 5)),
        direct([rng.randint(1, 9) for _ in range(ranks)], rng.randint(1, 5)),
    ]


def values_of(ranks: int, size: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Of very different sizes, so that another order of addition has other bits."""
    rng = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        return list(torch.randint(-(10**6), 10**6, (ranks, size), generator=rng).to(dtype))
    scale = 10.0 ** torch.randint(-3, 3, (ranks, size), generator=rng)
    return list((torch.randn((ranks, size), generator=rng) * scale).to(dtype))


def expected(plan: CollectivePlan, values: list[torch.Tensor], average: bool) -> torch.Tensor:
    """A second opinion: the plan run op by op over copies, all ranks in turn."""
    held = [value.clone() for value in values]
    bounds = plan.bounds(values[0].numel())
    wide = torch.float32 if values[0].dtype in HALF else values[0].dtype
    inbox: dict[tuple[int, int, int], torch.Tensor] = {}
    counts = [[1] * plan.pieces for _ in held]  # how many ranks' parts are in it
    parts: dict[tuple[int, int, int], list[int]] = {}
    left = [list(line) for line in plan.order]
    while any(left):
        for rank, line in enumerate(left):
            while line and all((s, rank, line[0].tag) in inbox for s in line[0].sources(rank)):
                op = line.pop(0)
                here = slice(bounds[op.piece], bounds[op.piece + op.length])
                if op.action.sends:
                    for target in op.ranks:
                        inbox[rank, target, op.tag] = held[rank][here].clone()
                        parts[rank, target, op.tag] = [counts[rank][p] for p in op.pieces]
                    continue
                if op.action is Action.TAKE:
                    held[rank][here] = inbox[op.ranks[0], rank, op.tag]
                    continue
                terms = [
                    held[rank][here] if one == rank else inbox[one, rank, op.tag]
                    for one in op.ranks
                ]
                total = terms[0].to(wide)
                for term in terms[1:]:
                    total = total + term
                for i, piece in enumerate(op.pieces):
                    counts[rank][piece] += sum(
                        parts[one, rank, op.tag][i] for one in op.ranks if one != rank
                    )
                    if average and counts[rank][piece] == plan.ranks:
                        own = slice(bounds[piece] - here.start, bounds[piece + 1] - here.start)
                        total[own] = total[own] / plan.ranks
                held[rank][here] = total.to(values[0].dtype)
    return held[0]


def exchange_of(me, ranks, timeout=PATIENCE) -> Exchange:
    names = [f"rank {rank}" for rank in range(ranks)]
    return Exchange(me.transport, me.open("reports"), me.rank, names, timeout)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def all_builders(me, ranks, seed):
    """Each builder with some size, dtype and operation; four of them in flight."""
    rng = random.Random(seed)
    exchange = exchange_of(me, ranks)
    flying = []
    for number in range(2):
        for plan in plans_of(ranks, rng):
            size, dtype = rng.choice((1, ranks - 1, 7, 100, 3001)), rng.choice(DTYPES)
            average = dtype.is_floating_point and rng.random() < 0.5
            values = values_of(ranks, size, dtype, rng.randrange(2**31))
            mine = values[me.rank].clone()
            op = ReduceOp.AVG if average else ReduceOp.SUM
            flying.append((exchange.start(mine, plan, op), mine, plan, values, average))
            if len(flying) == 4 or number == 1:
                work, got, *rest = flying.pop(rng.randrange(len(flying)))
                work.wait()
                assert work.done()
                assert same(got, expected(*rest)), (rest[0].name, size, dtype, average)
    for work, got, *rest in flying:
        work.wait()
        assert same(got, expected(*rest)), rest[0].name
    me.meet()
    return True


@pytest.mark.parametrize(("kind", "ranks"), [("eager", 5), ("tcp", 2)])
def test_every_builder_gives_the_bits_of_its_plan(kind, ranks):
    assert all(run(kind, all_builders, ranks, new_seed(), ranks=ranks))


def one_late(me, ranks, late):
    """The others start several, and ask who waits for whom; all end when it has come."""
    exchange, plan = exchange_of(me, ranks), direct(shares_without(ranks, [late]), 2)
    exchange.asks_after, exchange.looks_every = 0.0, 0.005
    exchange.start(torch.ones(40), plan).wait()
    tensors = [torch.full((40,), float(number)) for number in range(6)]
    if me.rank == late:
        me.meet()
    works = [exchange.start(tensor, plan) for tensor in tensors]
    if me.rank != late:
        assert not any(work.done() for work in works)
        asked = works[0]._number, me.rank
        until(lambda: exchange.reports.waits.get(asked) == late, "all others have sent their parts")
        me.meet()  # nobody waits in `start`
    for work in reversed(works):
        work.wait()
    assert [tensor[0].item() for tensor in tensors] == [ranks * number for number in range(6)]
    me.meet()
    return True


def test_start_waits_for_nobody():
    assert all(run("eager", one_late, 3, 2, ranks=3))


def not_finite(me, ranks):
    exchange, plan = exchange_of(me, ranks), direct((1, 1, 0), 2)
    mine = torch.tensor([1.0, torch.inf, torch.nan, 1e38, 0.0]) if me.rank == 1 else torch.ones(5)
    exchange.start(mine, plan).wait()
    me.meet()
    return mine.tolist()


def test_what_is_not_finite_goes_through():
    for one, inf, nan, large, zero in run("eager", not_finite, 3, ranks=3):
        assert (one, inf, large, zero) == (3.0, torch.inf, torch.tensor(1e38).item(), 2.0)
        assert nan != nan


def a_rank_goes(me, ranks, plan, lost, timeout):
    waits.POLL, waits.CHAIN = 0.05, 4.0
    exchange = exchange_of(me, ranks, timeout)
    exchange.start(torch.ones(400), plan).wait()
    me.meet()
    if me.rank == lost:
        me.say("ready")
        threading.Event().wait(PATIENCE)
    for _ in range(3):  # a killed one may have sent some, or none
        try:
            exchange.start(torch.ones(400), plan).wait()
        except PeerLost as error:
            with pytest.raises(PeerLost, match="waited for"):
                exchange.start(torch.ones(400), plan)  # nor does another one start
            me.say(str(error))  # now: what is lost takes a while to close
            return


@pytest.mark.parametrize(
    ("kind", "plan", "silent"),
    [
        ("gloo", direct((1, 1, 0, 1), 2), False),
        pytest.param("tcp", ring(4, 1), True, marks=pytest.mark.long),
    ],
    ids=["direct, killed", "ring, silent"],
)
def test_all_others_name_the_rank_that_is_lost(kind, plan, silent):
    timeout = SOON if silent else PATIENCE
    with Processes(a_rank_goes, 4, plan, 2, timeout, ranks=4, kind=kind) as processes:
        assert processes.reported(2) == "ready"
        if not silent:
            processes.kill(2)
        texts = [processes.reported(rank) for rank in (0, 1, 3)]
    assert all(text and text.startswith("waited for rank 2 in a collective") for text in texts), (
        texts
    )


class Unsent:
    """A transport whose sends arrive, but seem to end in another way."""

    def __init__(self, exchange, end) -> None:
        self._transport, self._end = exchange.transport, partial(end, exchange)

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def isend(self, buffer, peer, tag):
        work = self._transport.isend(buffer, peer, tag)
        work.wait = self._end
        return work


def closed(exchange, timeout):
    raise PeerLost("rank 1 has closed its engine")


def silent(exchange, timeout):
    exchange.timeout = 0.0  # it is over
    raise PeerLost(f"waited {timeout:g} s")


def unsent(me, end):
    exchange, tensor = exchange_of(me, 2), torch.ones(4)
    exchange.start(torch.ones(4), ring(2, 1)).wait()
    me.meet()
    if me.rank == 0:
        exchange.transport = Unsent(exchange, end)
    work = exchange.start(tensor, ring(2, 1))
    with contextlib.suppress(PeerLost):  # before it has left, where no copies are sent
        work.wait()
    assert work.left.wait(PATIENCE)
    error = exchange.error_of_loss() if me.rank == 0 else None
    me.meet()
    return str(error) if error else tensor.tolist()


@pytest.mark.parametrize("copied", [0, 16])  # bytes: what is sent itself, and copies
def test_a_rank_that_takes_nothing_is_lost_unless_it_has_ended_after_its_part(copied, monkeypatch):
    monkeypatch.setattr(exchange_module, "COPIED", copied)
    assert run("eager", unsent, closed) == [[2.0] * 4] * 2
    text, there = run("eager", unsent, silent)
    assert text == "waited for rank 1 in a collective: it took nothing in 0 s"
    assert there == [2.0] * 4


def differing(me, ranks, what):
    exchange = exchange_of(me, ranks)
    exchange.start(torch.ones(9), ring(ranks)).wait()
    odd = me.rank == 1
    plan = direct((1, 0, 1) if odd and what == "plan" else (1, 1, 1), 2)
    tensor = torch.ones(8 if odd and what == "size" else 9)
    op = ReduceOp.AVG if odd and what == "operation" else ReduceOp.SUM
    with pytest.raises(Disagreement) as caught:
        exchange.start(tensor, plan, op)
    me.meet()
    return str(caught.value)


@pytest.mark.parametrize("what", ["plan", "size", "operation"])
def test_a_difference_of_one_rank_is_found_on_all(what):
    texts = run("eager", differing, 3, what, ranks=3)
    assert len(set(texts)) == 1
    assert texts[0].startswith(
        "ranks start different collectives: sum of 9 torch.float32 by direct"
    )
    assert ": rank 0, rank 2; " in texts[0]
    assert texts[0].endswith(": rank 1")


def awaits_what_is_known(me):
    reports = exchange_of(me, 2).reports
    reports.plan(0, f"of {me.rank}")
    other = 1 - me.rank
    until(lambda: reports.read() or (0, other) in reports.plans, "the other one has reported")
    reports.await_one(other, 2 * PATIENCE, 0)  # and not for a second report
    me.meet()
    return reports.plans[0, other]


def test_a_report_that_is_known_is_not_waited_for():
    assert run("eager", awaits_what_is_known) == ["of 1", "of 0"]


class Calls:
    """A transport, and in which order it is called."""

    def __init__(self, transport) -> None:
        self._transport, self.made = transport, []

    def __getattr__(self, name):
        if name in ("isend", "irecv"):
            self.made.append(name)
        return getattr(self._transport, name)


def calls_of(me, plan):
    exchange = exchange_of(me, plan.ranks)
    exchange.start(torch.ones(60), plan).wait()  # which all know then
    calls = exchange.transport = Calls(exchange.transport)
    exchange.start(torch.ones(60), plan).wait()
    me.meet()
    return calls.made


def test_what_needs_nobodys_part_is_sent_before_receives_are_posted():
    plan = direct((1, 1, 0), 3)
    for rank, calls in enumerate(run("eager", calls_of, plan, ranks=3)):
        parts = sum(op.action is Action.PART for op in plan.order[rank])
        assert calls[: parts + 1] == ["isend"] * parts + ["irecv"]


def refusals(me, ranks):
    exchange, plan = exchange_of(me, ranks), ring(ranks)
    for tensor, other, op, text in (
        (torch.ones(4), ring(3), ReduceOp.SUM, "collective plan's ranks 3: there are 2"),
        (torch.ones(4), plan, ReduceOp.MAX, "SUM or AVG"),
        (torch.ones(4, dtype=torch.int32), plan, ReduceOp.AVG, "floats only"),
        (torch.ones(4, dtype=torch.bool), plan, ReduceOp.SUM, "floats and integers"),
        (torch.ones(4, 4).t(), plan, ReduceOp.SUM, "contiguous memory"),
        (torch.ones(4).to_sparse(), plan, ReduceOp.SUM, "dense, on the CPU"),
        (torch.ones(4, device="meta"), plan, ReduceOp.SUM, "dense, on the CPU"),
    ):
        with pytest.raises(BadInput, match=text):
            exchange.start(tensor, other, op)
    empty = torch.ones(0)
    exchange.start(empty, plan).wait()
    me.meet()
    return True


def test_what_is_not_handled_is_refused():
    assert all(run("eager", refusals, 2, ranks=2))


def test_tags_come_back_before_they_end():
    def body(me):
        exchange, plan = exchange_of(me, 2), ring(2)
        exchange._next_tag = 2**31 - plan.tags - 1
        for _ in range(3):
            tensor = torch.ones(8)
            exchange.start(tensor, plan).wait()
            assert tensor.tolist() == [2.0] * 8
        me.meet()
        return exchange._next_tag

    assert run("eager", body) == [2 * ring(2).tags] * 2
