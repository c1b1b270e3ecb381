"""The lower bounds: below every schedule, and as high as the best one wherever that is known."""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ir.strategies import of_depths, random_conditions, random_depths, random_schedule, seeds
from plan.bubbles import one_f_one_b_seconds
from plan.small_cases import OPTIMA, small_case

from benchmarks.common import both_ways
from megatron_adaptra.base.errors import ScheduleError
from megatron_adaptra.ir.check import SENDS, check
from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Line, Schedule, parse_line, peak_in_flight
from megatron_adaptra.model.bounds import lower_bound, unlimited_bound
from megatron_adaptra.plan.pipeline.fixed import stock_warmup
from megatron_adaptra.sim.clock import simulate
from megatron_adaptra.sim.warmup import WarmupClock

both_sends = st.sampled_from(SENDS)
LESS, MORE = 1 - 1e-12, 1 + 1e-12


def job(stages, count, links=None, forward=1.0, half=1.0, rest=1.0, **more) -> Conditions:
    def each(x):
        return (x,) * stages

    more = {"split": False, **more}
    return Conditions(count, each(forward), each(half), each(rest), links or {}, **more)


def held_by(order: tuple[Line, ...], chunks: int) -> tuple[float, ...]:
    """The budget that a schedule just keeps to."""
    return tuple(max(1.0, peak_in_flight(line, chunks)) for line in order)


# --- no schedule is faster -----------------------------------------------------------------------


@given(seeds, both_sends, st.none() | st.floats(0.5, 5))
@example(4538617, "eager", None)  # with chunks, `earliest` has to start from unlimited memory
def test_no_schedule_beats_the_bound_of_what_it_holds(seed, sends, cores):
    rng = random.Random(seed)
    stages, count, chunks = rng.randint(1, 4), rng.randint(1, 6), rng.choice([1, 1, 2, 3])
    shares = rng.choice([0, 0.5, 1]), rng.choice([0, 0, 0.3, 1])
    s = random_schedule(rng, stages, count, chunks, *shares)
    kinds = {op.kind for line in s.order for op in line}
    c = random_conditions(
        rng,
        stages,
        count,
        cores=cores,
        step_seconds=rng.choice([0.0, 0.5]),
        chunks=chunks,
        split=Kind.I in kinds,
        recompute=Kind.R in kinds,
        activation_budget=held_by(s.order, chunks),
    )
    if rng.random() < 0.3:
        c = c.healthy()
    if rng.random() < 0.3:  # costs that are not those of their parts
        own = [tuple(rng.uniform(0, 3) for _ in range(stages)) for _ in range(2)]
        c = replace(c, backward=own[0], recomputation=own[1])
    if rng.random() < 0.3:
        c = replace(c, core_share=tuple(rng.random() for _ in range(stages)))
    program = lower(s, rng.choice([None, 0, 1, 2, 9]))
    assert simulate(program, c, sends).makespan >= lower_bound(c) * LESS
    assert lower_bound(c) >= unlimited_bound(c) * LESS


@given(seeds, st.integers(1, 6), st.integers(1, 12), both_sends)
def test_no_warmup_beats_the_bound(seed, stages, count, sends):
    rng = random.Random(seed)
    depths = random_depths(rng, stages, count)
    c = random_conditions(rng, stages, count, activation_budget=tuple(map(float, depths)))
    seconds = WarmupClock(c, sends).seconds(depths)
    whole = replace(c, split=False)
    assert lower_bound(whole) <= seconds * MORE
    assert unlimited_bound(c) <= unlimited_bound(whole) * MORE


def all_lines(count: int, chunks: int, split: bool, recompute: bool) -> list[Line]:
    """Every order that one stage may run."""
    every = list(product(range(count), range(chunks)))
    lines: list[Line] = []
    for recomputed in (s for n in range(len(every) + 1) for s in combinations(every, n)):
        after: dict[Op, list[Op]] = {}
        for k, c in every:
            forward, backward = Op(Kind.F, k, c), Op(Kind.I if split else Kind.B, k, c)
            after[forward] = [Op(Kind.F, k, c - 1)] if c else []
            made = Op(Kind.R, k, c) if (k, c) in recomputed else forward
            if made is not forward:
                after[made] = [forward]
            after[backward] = [made]
            if c + 1 < chunks:
                after[backward].append(backward._replace(chunk=c + 1))
            if split:
                after[Op(Kind.W, k, c)] = [backward]
        lines += orders(after, ())
        if not recompute:
            break
    return lines


def orders(after: dict[Op, list[Op]], so_far: Line) -> Iterator[Line]:
    if len(so_far) == len(after):
        yield so_far
    for op, needed in after.items():
        if op not in so_far and set(needed) <= set(so_far):
            yield from orders(after, (*so_far, op))


@pytest.mark.long
@pytest.mark.parametrize(
    ("stages", "count", "chunks", "split", "recompute"),
    [
        (1, 3, 1, True, False),
        (1, 2, 1, True, True),
        (1, 2, 2, False, False),
        (2, 3, 1, False, False),
        (2, 2, 1, True, False),
        (2, 2, 1, False, True),
        (2, 1, 2, True, True),
        (3, 2, 1, False, False),
    ],
)
def test_the_best_of_all_schedules(stages, count, chunks, split, recompute):
    """With every budget that one of them just keeps to; on one stage, the bound is that best."""
    lines = all_lines(count, chunks, split, recompute)
    for seed in range(2 if len(lines) > 30 else 6):
        rng = random.Random(seed)
        c = random_conditions(rng, stages, count, chunks=chunks, split=split, recompute=recompute)
        best: dict[tuple[float, ...], float] = {}
        # Stage 0 may as well start the microbatches in their order.
        firsts = [line for line in lines if Op(Kind.F, 0) in line and in_turn(line)]
        for order in product(firsts, *[lines] * (stages - 1)):
            try:
                seconds = simulate(lower(Schedule(order, count, chunks)), c).makespan
            except ScheduleError:
                continue
            held = held_by(order, chunks)
            best[held] = min(seconds, best.get(held, math.inf))
        for budget in best:
            within = [
                seconds
                for held, seconds in best.items()
                if all(a <= b for a, b in zip(held, budget, strict=True))
            ]
            bound = lower_bound(replace(c, activation_budget=budget))
            assert bound <= min(within) * MORE, (seed, budget)
            if stages == 1:
                assert bound == pytest.approx(min(within), rel=1e-12)


def in_turn(line: Line) -> bool:
    started = [op.microbatch for op in line if op.kind is Kind.F and op.chunk == 0]
    return started == sorted(started)


# --- and it is reached ---------------------------------------------------------------------------


def test_small_optima():
    """Of 200 random jobs, solved by policy `exact`; a quarter may recompute, for which the bound
    is weaker."""
    gaps = []
    for seed, found in json.loads(OPTIMA.read_text()).items():
        c = small_case(int(seed))
        assert lower_bound(c) <= found["seconds"] * (1 + 1e-9), seed
        if found["proven"]:
            gaps.append((1 - lower_bound(c) / found["seconds"], c.recompute))
    plain = [gap for gap, recompute in gaps if not recompute]
    assert sum(gap < 1e-6 for gap in plain) >= 0.95 * len(plain) > 100
    assert max(plain) < 0.05
    assert sum(gap for gap, _ in gaps) / len(gaps) < 0.005


# The published 4 x 12 jobs (shared/data/pipemorph_profiles.json) with split backwards: slow link,
# ms each way, ms of forward, I and W per stage, and optima proven by CP-SAT with 4, 6 and 8
# microbatches in flight per stage.
PUBLISHED = [
    (0, 30, (8, 9, 10, 9), (10, 10, 10, 9), (5, 6, 6, 6), (497, 395, 360)),
    (0, 60, (8, 9, 9, 9), (10, 10, 10, 9), (5, 6, 6, 6), (675, 513, 467)),
    (2, 30, (8, 9, 10, 9), (10, 10, 10, 9), (5, 6, 6, 6), (491, 395, 350)),
    (2, 60, (9, 9, 9, 9), (10, 10, 10, 9), (5, 6, 6, 6), (673, 520, 472)),
]


@pytest.mark.parametrize(("link", "delay", "f", "i", "w", "optima"), PUBLISHED)
def test_published_jobs(link, delay, f, i, w, optima):
    c = Conditions(12, f, i, w, both_ways({link: float(delay)}))
    for budget, best in zip((4, 6, 8), optima, strict=True):
        limited = replace(c, activation_budget=(budget,) * 4)
        assert 0.98 * best <= lower_bound(limited) <= best
        recomputing = lower_bound(replace(limited, recompute=True))
        assert unlimited_bound(c) <= recomputing <= lower_bound(limited)


# Each shows one detail of the bound; the optima were proven by CP-SAT.
DETAILS = [
    # W has to be done before the last I, as nothing else gives back enough for its F.
    (job(2, 4, forward=9.0, half=8.0, rest=2.0, split=True, activation_budget=(3.0, 2.0)), 89),
    # Chunks: a stage has nothing to do before its first F,
    (Conditions(4, (4, 12), (10, 8), (2, 6), chunks=2, split=False, activation_budget=(3, 3)), 112),
    # and F of chunk 1 comes after what had to be done before.
    (
        Conditions(
            4,
            (2, 2),
            (8, 8),
            (8, 8),
            {(0, 1): LinkState(7.0), (1, 0): LinkState(3.0)},
            chunks=2,
            split=False,
            activation_budget=(4.5, 4.5),
        ),
        99,
    ),
]


@pytest.mark.parametrize(("c", "best"), DETAILS)
def test_details(c, best):
    assert lower_bound(c) == best


@given(st.integers(1, 8), st.integers(1, 24), st.integers(0, 9), st.integers(0, 9))
def test_nothing_beats_1f1b_within_its_memory(stages, count, forward, backward):
    """On healthy links and equal stages; whole numbers add up exactly."""
    own = tuple(map(float, stock_warmup(stages, count)))
    c = job(stages, count, forward=float(forward), half=float(backward), activation_budget=own)
    seconds = one_f_one_b_seconds(stages, count, forward, backward + 1)
    assert lower_bound(c) == seconds
    assert lower_bound(replace(c, split=True)) <= seconds


@pytest.mark.parametrize(("count", "held"), [(12, 1), (12, 4), (12, 5), (24, 8), (3, 8)])
def test_a_round_trip_per_microbatches_in_flight(count, held):
    # F on stage 0, 50 there, F and B, 50 back: a gradient is there at 104. Then B and F in turn.
    c = job(2, count, both_ways([50.0]), activation_budget=(held, held))
    rounds, last = divmod(count - 1, held)
    assert lower_bound(c) == rounds * 106 + 106 + 3 * last
    program = lower(of_depths((min(held, count), 1), count))
    assert simulate(program, c).makespan == lower_bound(c)


def test_halves_of_a_backward_hold_half():
    # One in flight: the next F waits for W, the last half; F 1, 50, F 1, I 1, 50, I 1, W 1.
    c = job(2, 5, both_ways([50.0]), split=True, activation_budget=(1.0, 1.0))
    assert lower_bound(c) == 5 * 105
    # With R it need not: 0.5 and 0.05 fit. But no two may be between F and I: 1 and 0.05 do not.
    assert lower_bound(replace(c, recompute=True)) == 5 * 104 + 1
    # A half more, and W need not be done before the next F either.
    assert lower_bound(replace(c, activation_budget=(1.5, 1.5))) == 5 * 104 + 1
    # Two in flight: F2 waits for I0 until 104, and for W0 or for I1, which is there at 105.
    c = replace(c, microbatches=3, activation_budget=(2.0, 9.0))
    assert lower_bound(c) == 105 + 104 + 1
    assert lower_bound(replace(c, backward_weight=(9.0, 1.0))) == 106 + 104 + 9


def test_what_is_made_before_the_first_gradient_is_there():
    # F 3, 50, F and B 1 and 2, 50: at 106, stage 0 holds 2, and the others are all to be made.
    c = job(2, 20, both_ways([50.0]), activation_budget=(2.0, 20.0), recompute=True)
    assert lower_bound(replace(c, forward=(3.0, 1.0))) == 106 + 18 * 3 + 20 * 2


def test_full_backwards_hold_whole_microbatches():
    c = job(2, 12, both_ways([50.0]), activation_budget=(4.5, 4.9))
    assert lower_bound(c) == lower_bound(replace(c, activation_budget=(4.0, 4.0)))


def test_a_chunk_may_be_recomputed_after_the_next():
    # R of chunk 0 comes when its gradient does, so that F of chunk 1 need not wait for it.
    rows = "F0 F1 F0.1 F1.1 B0.1 B1.1 R0 B0 R1 B1", "F0 F1 F0.1 F1.1 B0.1 B1.1 R0 B0 R1 B1"
    s = Schedule(tuple(parse_line(row.split()) for row in rows), 2, 2)
    c = job(2, 2, both_ways([50.0]), chunks=2, recompute=True, activation_budget=(1.05, 1.05))
    program = lower(s)
    check(program, c.activation_budget)
    assert unlimited_bound(c) <= lower_bound(c) <= simulate(program, c).makespan


def test_recomputed_microbatches_cost_their_forwards():
    # Two at a time, 36 each: 11 of the 20 take 216. With 10 recomputed, there is work for 200.
    c = job(2, 20, both_ways([10.0]), 4.0, 2.0, 2.0, activation_budget=(2.0, 2.0))
    assert unlimited_bound(c) == 20 * 8 + 28
    assert lower_bound(replace(c, recompute=True)) == 20 * 8 + 10 * 4
    assert lower_bound(c) == 10 * 36 + 8
    # The same behind another stage: 1 until the first F is there, 2 from the last B to the end.
    c = Conditions(20, (1, 4, 4), (1, 2, 2), (1, 2, 2), both_ways([0.0, 10.0]), split=False)
    c = replace(c, activation_budget=(20, 2, 2), recompute=True)
    assert lower_bound(c) == 1 + 20 * 8 + 10 * 4 + 2
    # Here recomputing 10 is too much work (223), and with 9 the others take longer than it (217).
    c = replace(c, forward=(1, 6, 6), backward_input=(1, 1, 1), backward_weight=(1, 1, 1))
    assert lower_bound(c) == 1 + 6 * 36 + 2


def test_known_by_hand():
    for count in (1, 4, 9):
        c = job(3, count)
        program = lower(of_depths(stock_warmup(3, count), count))
        assert lower_bound(c) == simulate(program, c).makespan
    # One microbatch: the round trip. Many over a narrow link: what the link carries.
    c = job(2, 1, {(0, 1): LinkState(5.0), (1, 0): LinkState(7.0)})
    assert lower_bound(c) == 1 + 5 + 1 + 2 + 7 + 2
    narrow = job(2, 10, {(0, 1): LinkState(5.0, 0.1)}, message_bytes=1.0)
    assert lower_bound(narrow) == 1 + 10 * 10 + 5 + 1 + 2 + 2
    # 60 seconds of work on two cores, but only one of them has any before 1.
    assert lower_bound(job(4, 5, cores=2.0)) == 1 + (60 - 1) / 2
    # Two chunks, backwards that take no time: stage 1 waits for half a forward only.
    c = job(2, 2, forward=2.0, half=0.0, rest=0.0)
    assert lower_bound(replace(c, chunks=2)) == 5
    assert lower_bound(c) == 6
    # This way go the outputs of F on both chunks, and a gradient from one to the other.
    wide = replace(c, chunks=2, message_bytes=1.0, links={(0, 1): LinkState(3.0, 0.1)})
    assert lower_bound(wide) == 1 + 2 * 3 * 10 + 3
    assert lower_bound(job(2, 2, {(0, 1): LinkState(0.0, 1e-300)}, message_bytes=0.0)) < math.inf


def test_a_budget_that_holds_everything_is_no_limit():
    for seed in range(20):
        rng = random.Random(seed)
        stages, count, chunks = rng.randint(1, 5), rng.randint(1, 9), rng.randint(1, 2)
        c = random_conditions(rng, stages, count, chunks=chunks, step_seconds=2.0)
        assert lower_bound(c) == unlimited_bound(c)
        for recompute in (False, True):
            budget = tuple(rng.choice([math.inf, float(count)]) for _ in range(stages))
            enough = replace(c, activation_budget=budget, recompute=recompute)
            assert lower_bound(enough) == lower_bound(c)
            one = replace(enough, activation_budget=(*budget[1:], 1.0))
            assert lower_bound(one) >= lower_bound(c) * LESS
        assert lower_bound(c) == pytest.approx(lower_bound(replace(c, step_seconds=0.0)) + 2)
