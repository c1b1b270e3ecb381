"""The clock of ports: worked examples, no plan faster than the bound, and what it refuses."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import groupby, pairwise

import pytest
from seeding import new_seed

from benchmarks.common import equal_ports
from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.collective import CollectivePlan
from megatron_adaptra.ir.conditions import LinkState
from megatron_adaptra.plan.reductions.builders import (
    direct,
    halving_doubling,
    ring,
    shares_without,
    sorted_chain,
)
from megatron_adaptra.sim.ports import Ports, run_on_ports

MB = 1_000_000


def test_two_ranks_by_hand():
    """0.1 s of a port each way at once, twice, with 0.01 s of delay and 0.001 s per message."""
    ports = equal_ports([10e6, 10e6], 0.01, 0.001)
    done = run_on_ports(ring(2, 1), 2 * MB, ports)
    assert done.ends == pytest.approx([2 * (0.1 + 0.01 + 0.001)] * 2)
    late = run_on_ports(ring(2, 1), 2 * MB, ports, [0.0, 5.0])
    assert late.after_arrival == pytest.approx(0.1 + 0.01 + 0.001 + 0.1 + 0.01 + 0.001)
    assert len(late.transfers) == 4


def test_a_slow_path_by_hand():
    """Rank 0 sends 1 MB to each: 1 s of the path to rank 1, and 0.2 s more of delay."""
    paths = {(0, 1): LinkState(0.2, 1e6)}
    text = (
        'collective {"name": "", "weights": [1, 1], "why": ""}\n'
        "0: A0=0+1+2 S0>1,2 A1=0+1+2 S1>1,2\n1: P0>0 P1>0 R0<0 R1<0\n2: P0>0 P1>0 R0<0 R1<0\n"
    )
    plan = CollectivePlan.parse(text)
    plain, slow = (
        run_on_ports(plan, 2 * MB, equal_ports([10e6] * 3, 0.01, paths=which))
        for which in ({}, paths)
    )
    # Of the first piece both parts are there after 0.21 s. The second sum waits for the first one.
    assert slow.ends == pytest.approx([plain.ends[0], 0.21 + 2 * 1.0 + 0.01 + 0.2, plain.ends[2]])
    quick = equal_ports([10e6] * 3, 0.01, paths={(0, 1): LinkState(0.2, 20e6)})
    assert run_on_ports(plan, 2 * MB, quick).ends[1] == pytest.approx(plain.ends[1] + 0.2)


def test_a_slow_receiver_holds_up_nobody_else():
    """Rank 0 sends 1 MB to each: rank 2 has it at once, rank 1's port takes 1 s."""
    text = (
        'collective {"name": "", "weights": [1], "why": ""}\n0: A0=0+1+2 S0>1,2\n1: P0>0 R0<0\n'
        "2: P0>0 R0<0\n"
    )
    ports = Ports((10e6,) * 3, (10e6, 1e6, 10e6))
    done = run_on_ports(CollectivePlan.parse(text), MB, ports)
    # Both parts share the port of rank 0, then one sum after the other leaves it.
    assert done.ends == pytest.approx([0.4, 1.2, 0.4])


def test_connections_take_turns_by_bytes():
    """Rank 0 has both parts after 0.2 s, then sends the sum to both others."""
    plan = direct([1, 0, 0], 1)
    for turn, ends in ((math.inf, [0.4, 0.3, 0.4]), (MB / 2, [0.4, 0.35, 0.4])):
        done = run_on_ports(plan, MB, equal_ports([10e6] * 3, turn=turn))
        assert done.ends == pytest.approx(ends)
        assert len(done.transfers) == 4
    # Half the buffer at a time: with two connections at one port both messages end at its end.
    late = [0.0, 0.0, 0.0, 0.1]
    whole, shared = (
        run_on_ports(halving_doubling(4), MB, equal_ports([10e6] * 4, turn=turn), late)
        for turn in (math.inf, 1000)
    )
    assert shared.after_arrival > 1.1 * whole.after_arrival


# Of 8 hosts with 20 MB/s, or 4, and 3.2 MB: ratios to the ring of the published model.
@pytest.mark.parametrize(
    ("ranks", "late", "late_ranks", "ratio"),
    [
        (8, 0.16, [7], 1.63),
        (4, 0.16, [3], 1.40),
        (8, 0.08, [7], 1.24),
        (8, 0.32, [6, 7], 1.40),
        (8, 0.0, [7], 0.94),
    ],
)
def test_owners_against_a_ring(ranks, late, late_ranks, ratio):
    ports = equal_ports([20e6] * ranks, 0.3e-3)
    arrivals = [late * (rank in late_ranks) for rank in range(ranks)]
    plan = direct(shares_without(ranks, late_ranks), 16 if ranks == 8 else 32)
    of = [run_on_ports(each, 3_200_000, ports, arrivals) for each in (ring(ranks), plan)]
    assert of[0].after_arrival / of[1].after_arrival == pytest.approx(ratio, rel=0.06)


def test_a_port_at_half_its_rate():
    ports = equal_ports([*[20e6] * 7, 10e6], 0.3e-3)
    plan = direct(shares_without(8, [7]), 16)
    of = [run_on_ports(each, 3_200_000, ports).after_arrival for each in (ring(8), plan)]
    assert of[0] / of[1] == pytest.approx(1.64, rel=0.03)


def all_reduce_bound(
    nbytes: int,
    out: Sequence[float],
    into: Sequence[float],
    arrivals: Sequence[float],
    delay: float,
) -> float:
    """Seconds from the arrival of the last rank to the end of the last one, at least.

    Of each byte every rank sends at least its own part or the sum, after it has come; it receives
    at least the others' sum or all of it, once another one has come. N ranks need N - 1 transfers
    of a byte until its sum is known, and N - 1 until all have it, of which the last N - 1 are
    after the last rank has come.

    Args:
        nbytes: of the buffer.
        out, into: bytes per second that each rank can send, and receive, in all.
        arrivals: seconds at which each rank comes.
        delay: seconds from a rank to another one.
    """
    ranks, last = len(arrivals), max(arrivals)
    if ranks < 2 or not nbytes:
        return 0.0
    ends = [last]
    for rank, came in enumerate(arrivals):
        others = min(moment for other, moment in enumerate(arrivals) if other != rank)
        ends.append(came + nbytes / out[rank] + delay)
        ends.append(others + nbytes / into[rank] + delay)
    for rates in (out, into):
        ends.append(min(arrivals) + 2 * (ranks - 1) * nbytes / sum(rates) + delay)
        ends.append(last + (ranks - 1) * nbytes / sum(rates) + delay)
    return max(ends) - last


def test_no_plan_beats_the_bound_and_no_port_does_two_things_at_once():
    rng = random.Random(new_seed())
    for _ in range(60):
        ranks = rng.randint(2, 12)
        late = rng.sample(range(ranks), rng.randrange(ranks))
        plan = rng.choice(
            [
                ring(ranks, rng.randint(1, 4)),
                halving_doubling(ranks),
                sorted_chain(rng.sample(range(ranks), ranks), rng.randint(1, 20)),
                direct(shares_without(ranks, late), rng.randint(1, 8)),
            ]
        )
        out = tuple(rng.choice([1e6, 3e6, 1e7]) for _ in range(ranks))
        into = tuple(rng.choice([1e6, 3e6, 1e7]) for _ in range(ranks))
        ways = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
        slow = {way: LinkState(rng.random() / 100, 10 ** rng.uniform(5, 8)) for way in ways[::5]}
        ports = Ports(out, into, rng.choice([0.0, 0.01]), rng.choice([0.0, 0.001]), paths=slow)
        arrivals = [rng.random() * (rank in late) for rank in range(ranks)]
        nbytes = rng.choice([1, 7, 10_000, MB])
        done = run_on_ports(plan, nbytes, ports, arrivals)
        bound = all_reduce_bound(nbytes, out, into, arrivals, ports.delay)
        slack = ranks * plan.pieces / min(*out, *into)  # pieces are whole bytes
        assert done.after_arrival >= bound - slack
        for side in ("source", "target"):
            spans = ("sent", "left") if side == "source" else ("began", "arrived")
            by_port = sorted(done.transfers, key=lambda t: (getattr(t, side), getattr(t, spans[0])))
            for _, group in groupby(by_port, key=lambda t: getattr(t, side)):
                times = [(getattr(t, spans[0]), getattr(t, spans[1])) for t in group]
                assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(times))
        for each in done.transfers:
            assert each.sent >= arrivals[each.source]
            assert each.arrived >= each.left + ports.delay - 1e-9
            assert each.arrived <= done.ends[each.target] + 1e-9


def test_no_limit_at_all():
    done = run_on_ports(ring(4), MB, equal_ports([math.inf] * 4), [0, 1, 2, 3])
    assert done.ends == (3, 3, 3, 3)


def _path(source: int, target: int, **state: float) -> Ports:
    return equal_ports([1.0, 1.0], paths={(source, target): LinkState(**state)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ports((1.0,), (1.0, 2.0)), "rates of ports"),
        (lambda: equal_ports([0.0, 1.0]), "rate of a port"),
        (lambda: equal_ports([1.0, 1.0], -1.0), "delay of ports"),
        (lambda: equal_ports([1.0, 1.0], turn=0.5), "turn of a connection"),
        (lambda: _path(0, 2), "path between ports .0-2.: .* ranks 0 to 1"),
        (lambda: _path(0, 1, delay=-1.0), "delay of a path -1.0"),
        (lambda: run_on_ports(ring(3), 8, equal_ports([1.0, 1.0])), "number of ports"),
        (lambda: run_on_ports(ring(2), 8, equal_ports([1.0, 1.0]), [1.0]), "number of arrivals"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(BadInput, match=message):
        make()
