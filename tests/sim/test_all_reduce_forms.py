"""Closed forms of all-reduces against the clock of ports, and the pieces chosen by them."""

from __future__ import annotations

import math
import random
from statistics import median

import pytest

from megatron_adaptra.errors import BadInput
from megatron_adaptra.ir.collective import CollectivePlan
from megatron_adaptra.model.all_reduce_forms import (
    ALGORITHMS,
    AllReduce,
    best_pieces,
    seconds_after_arrival,
)
from megatron_adaptra.plan.collectives.sized import sized
from megatron_adaptra.sim.ports import Ports, run_on_ports

RATE = 1e8


def by_clock(plan: CollectivePlan, job: AllReduce) -> float:
    """Seconds after the arrival of the last rank, message by message."""
    ports = Ports.equal([job.rate] * job.ranks, job.delay, job.cost)
    arrivals = [0.0] * (job.ranks - 1) + [job.late]
    return run_on_ports(plan, int(job.nbytes), ports, arrivals).after_arrival


def jobs(rng: random.Random, count: int) -> list[tuple[AllReduce, float]]:
    """All-reduces between 4 to 16 ranks, with how many buffers' times the last one is late."""
    found = []
    for _ in range(count):
        nbytes = rng.choice([1e6, 1e7, 1e8])
        buffer = nbytes / RATE
        late = rng.choice([0, 0.25, 0.5, 1, 20])
        delay, cost = buffer * rng.choice([0, 1e-3, 1e-2]), buffer * rng.choice([1e-4, 1e-3, 1e-2])
        job = AllReduce(rng.choice([4, 5, 7, 8, 12, 16]), nbytes, RATE, delay, cost, late * buffer)
        found.append((job, late))
    return found


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_forms_are_what_the_clock_says(algorithm: str) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    ratios = []
    for job, late in jobs(random.Random(seed), 15):
        power = job.ranks & (job.ranks - 1) == 0
        pieces = min(best_pieces(algorithm, job), 4 if algorithm == "stragglar" else 64)
        found = by_clock(sized(algorithm, job, [job.ranks - 1], pieces), job)
        ratio = seconds_after_arrival(algorithm, job, pieces) / found
        ratios.append(ratio)
        allowed = 0.35 if algorithm == "stragglar" and 0 < late <= 1 else 0.2
        if algorithm == "ring" or (algorithm == "halving-doubling" and power):
            allowed = 0.05 if 0 < late <= 1 else 1e-3  # whole bytes
        assert abs(math.log(ratio)) <= math.log1p(allowed), (job, pieces, ratio)
    assert median(ratios) == pytest.approx(1, abs=0.08)


@pytest.mark.parametrize("algorithm", ["sorted-chain", "direct", "stragglar"])
def test_the_chosen_pieces_are_nearly_the_best_by_the_clock(algorithm: str) -> None:
    """No other number of pieces is faster by more than the error of the forms, 10 %."""
    for ranks, cost in ((4, 1e-3), (8, 1e-4), (8, 1e-2)):
        job = AllReduce(ranks, 1e7, RATE, 1e-4, cost * 0.1, 1.0)
        chosen = by_clock(sized(algorithm, job, [ranks - 1]), job)
        others = [
            by_clock(sized(algorithm, job, [ranks - 1], pieces), job) for pieces in (1, 2, 4, 8, 16)
        ]
        assert chosen <= 1.1 * min(others)


def test_more_pieces_where_messages_are_cheap_and_fewer_where_they_are_not() -> None:
    for algorithm in ("sorted-chain", "direct", "stragglar"):
        counts = [
            best_pieces(algorithm, AllReduce(8, 1e8, RATE, cost=cost, late=math.inf))
            for cost in (1e-5, 1e-3, 1e-1)
        ]
        assert counts == sorted(counts, reverse=True)
        assert counts[0] > counts[1] > counts[2]
        assert best_pieces(algorithm, AllReduce(8, 1e8, RATE, late=math.inf), 3) <= 3


def test_large_groups_have_one_piece_per_owner_in_stragglar() -> None:
    """Rounds of 128 ranks and more are not searched, which takes minutes."""
    job = AllReduce(128, 1e12, RATE, cost=1e-6, late=math.inf)
    assert best_pieces("stragglar", job) > 1
    assert sized("stragglar", job, [5]).pieces == 127


def test_a_plan_by_name() -> None:
    job = AllReduce(6, 1e7, RATE, cost=1e-4, late=math.inf)
    for algorithm in ALGORITHMS:
        plan = sized(algorithm, job, [2])
        assert (plan.name, plan.ranks) == (algorithm, 6)
        assert sized(algorithm, job, [2]).text() == plan.text()
    assert "rank 2 adds last" in sized("sorted-chain", job, [2]).why


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AllReduce(1, 1e6, RATE), "^ranks 1: at least 2"),
        (lambda: AllReduce(4, -1, RATE), "^nbytes -1: at least 0"),
        (lambda: AllReduce(4, 1, 0.0), "^rate 0.0: "),
        (lambda: AllReduce(4, 1, RATE, late=math.nan), "^late nan: "),
        (lambda: seconds_after_arrival("tree", AllReduce(4, 1, RATE), 1), "^algorithm 'tree'"),
        (lambda: best_pieces("tree", AllReduce(4, 1, RATE)), "^algorithm 'tree'"),
        (lambda: sized("tree", AllReduce(4, 1, RATE)), "^algorithm 'tree'"),
        (lambda: sized("ring", AllReduce(4, 1, RATE), [4]), "^late rank 4: "),
        (lambda: sized("stragglar", AllReduce(4, 1, RATE), [1, 2]), "needs the one rank"),
        (lambda: sized("stragglar", AllReduce(3, 1, RATE), [1]), "^ranks 3: .* at least 4"),
    ],
)
def test_bad_input(make, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make()
