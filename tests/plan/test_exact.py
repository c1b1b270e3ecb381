"""The optimum by CP-SAT: against all schedules, the simulator, and other policies."""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from exact import MOST_OPS, Optimum, solve
from ir.strategies import of_depths
from processes_alike import printed
from sim.reference import reference_seconds
from small_cases import OPTIMA, small_case

from megatron_adaptra.errors import BadInput, ScheduleError
from megatron_adaptra.ir.check import check
from megatron_adaptra.ir.conditions import Conditions, LinkState, both_ways
from megatron_adaptra.ir.in_flight import peak_in_flight
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Line, Schedule, parse_line
from megatron_adaptra.model.bounds import lower_bound
from megatron_adaptra.plan import evaluate, make_plan

pytestmark = pytest.mark.large

NEAR = 1e-6  # what the rounding to ticks may cost, relative
TIGHT = 1e-9


def verified(c: Conditions, **more: object) -> Optimum:
    """The optimum, after all that it says of itself has been checked."""
    found = solve(c, **more)  # type: ignore[arg-type]
    plan = evaluate(found.schedule, c)
    check(plan.program, c.activation_budget)
    assert plan.predicted == found.seconds
    assert found.bound <= found.seconds
    assert found.schedule.policy == "exact"
    assert found.schedule.why.startswith("optimal: ") == found.proven
    if found.proven:
        assert found.seconds - found.bound <= NEAR * found.seconds
    return found


def job(rng: random.Random, stages: int, count: int, **more: object) -> Conditions:
    """A job of any times, with links that take time; half of them are narrow."""
    links = {}
    for i in range(stages):
        for way in ((i, (i + 1) % stages), ((i + 1) % stages, i)):
            delay = rng.choice((0.0, rng.uniform(0, 6)))
            links[way] = LinkState(delay, rng.choice((math.inf, rng.uniform(0.1, 1))))
    seconds = [tuple(rng.uniform(0.3, 3) for _ in range(stages)) for _ in range(3)]
    return Conditions(count, *seconds, links, 1.0, **more)  # type: ignore[arg-type]


def test_backwards_cheaper_in_one_piece_are_put_together_and_nothing_is_claimed():
    c = Conditions(4, (1.0,), (1.0,), (1.0,), backward=(1.5,))
    found = verified(c)
    assert not found.proven
    assert found.bound == lower_bound(c)
    assert found.seconds < verified(replace(c, backward=())).seconds
    assert any(op.kind is Kind.B for line in found.schedule.order for op in line)


# --- trying everything ---------------------------------------------------------------------------


def lines(needed: dict[Op, list[Op]], budget: float, chunks: int) -> Iterator[Line]:
    """Every order of these ops within the budget in which none comes before what it needs."""

    def extend(line: Line, left: set[Op]) -> Iterator[Line]:
        if not left and peak_in_flight(line, chunks) <= budget + TIGHT:
            yield line
        for op in sorted(left):
            if not left.intersection(needed[op]):
                yield from extend((*line, op), left - {op})

    return extend((), set(needed))


def stage_lines(c: Conditions, stage: int, ordered: bool) -> Iterator[Line]:
    """Every line of a stage; `ordered`: only those that take each kind in microbatch order."""
    units = list(product(range(c.microbatches), range(c.chunks)))
    for choice in product((False, True), repeat=len(units) if c.recompute else 0):
        recomputed = {unit for unit, chosen in zip(units, choice, strict=False) if chosen}
        needed: dict[Op, list[Op]] = {}
        for k, v in units:
            forward, remade = Op(Kind.F, k, v), Op(Kind.R, k, v)
            back, weight = Op(Kind.I if c.split else Kind.B, k, v), Op(Kind.W, k, v)
            needed[forward] = [forward._replace(chunk=v - 1)] if v else []
            needed[back] = [forward] if v == c.chunks - 1 else [back._replace(chunk=v + 1)]
            if (k, v) in recomputed:
                needed[remade] = [forward]
                needed[back].append(remade)
            if c.split:
                needed[weight] = [back]
        if ordered:
            for a, b in product(needed, repeat=2):
                if (a.kind, a.chunk) == (b.kind, b.chunk) and a.microbatch < b.microbatch:
                    needed[b].append(a)
        yield from lines(needed, c.activation_budget[stage], c.chunks)


def best_of_all(c: Conditions, ordered: bool) -> tuple[float, int]:
    """The least seconds by the slow simulator, and how many schedules can run."""
    best, tried = math.inf, 0
    for order in product(*(list(stage_lines(c, s, ordered)) for s in range(c.stages))):
        program = lower(Schedule(order, c.microbatches, c.chunks))
        try:
            check(program)
        except ScheduleError:
            continue
        tried += 1
        best = min(best, reference_seconds(program, c, "eager"))
    return best, tried


# What every shape tries, some 15 000 schedules in all. "Any order" also takes microbatches out of
# order, which shows that nothing is lost by leaving these out.
TRIED = {
    "halves": (2, 2, False, {}),
    "halves, three microbatches": (2, 3, True, {}),
    "halves, recompute": (2, 2, True, {"recompute": True}),
    "whole, three microbatches": (2, 3, False, {"split": False}),
    "whole, recompute": (2, 2, False, {"split": False, "recompute": True}),
    "three stages": (3, 2, False, {"split": False}),
    "three stages, a port": (3, 2, False, {"split": False, "ports": {1: 0.3}}),
    "two chunks, halves": (2, 1, False, {"chunks": 2}),
    "two chunks, whole": (2, 2, True, {"split": False, "chunks": 2}),
}


@pytest.mark.long
@pytest.mark.parametrize("shape", TRIED)
@pytest.mark.parametrize("seed", range(3))
def test_as_fast_as_the_best_of_all(shape, seed):
    stages, count, ordered, more = TRIED[shape]
    rng = random.Random(seed)
    budgets = tuple(rng.choice((math.inf, 1.0, 1.05, 1.5, 2.0, 2.5)) for _ in range(stages))
    c = job(rng, stages, count, activation_budget=budgets, **more)
    best, tried = best_of_all(c, ordered)
    found = verified(c)
    assert found.proven
    assert found.seconds == pytest.approx(best, rel=NEAR), f"{tried} tried: {c}"


# --- optima that are known -----------------------------------------------------------------------


def equal(stages: int, count: int, f: float, i: float, w: float, **more: object) -> Conditions:
    times = ((seconds,) * stages for seconds in (f, i, w))
    return Conditions(count, *times, **more)  # type: ignore[arg-type]


def test_1f1b_is_best_on_healthy_links_with_whole_backwards():
    c = equal(4, 8, 1.0, 1.0, 1.0, split=False)
    found = verified(c)
    stock = make_plan(c, "1f1b").schedule
    assert found.proven
    assert found.seconds == 11 * 3.0
    assert found.schedule.order == stock.order  # a plan that is known is kept if none is faster


def test_halves_leave_no_bubble_but_the_start_and_the_end():
    # The first stage works 24 without a pause, and the last one starts 3 later.
    found = verified(equal(4, 8, 1.0, 1.0, 1.0))
    assert found.proven
    assert found.seconds == pytest.approx(24 + 3)


def test_the_optimizer_comes_on_top():
    c = equal(2, 3, 1.0, 2.0, 1.0)
    assert verified(replace(c, step_seconds=7.0)).seconds == pytest.approx(verified(c).seconds + 7)


def test_a_narrow_link_is_a_queue():
    # F0 ends at 1, the five messages hold the link for 3 each, and then: F4 I4 below, I4 W4 above.
    narrow = {(0, 1): LinkState(0.0, 1 / 3)}
    c = equal(2, 5, 1.0, 1.0, 1.0, links=narrow, message_bytes=1.0)
    assert verified(c).seconds == pytest.approx(1 + 5 * 3 + 2 + 2)


def test_what_stays_on_a_stage_does_not_wait_for_the_link():
    # F, 3 on the way, F I and the long W, while the gradient is on its way up.
    narrow = {(0, 1): LinkState(0.0, 1 / 3), (1, 0): LinkState(0.0, 1 / 3)}
    c = Conditions(1, (1.0, 1.0), (1.0, 1.0), (1.0, 9.0), narrow, message_bytes=1.0)
    assert verified(c).seconds == pytest.approx(1 + 3 + 1 + 1 + 9)


def test_recompute_hides_in_the_wait_for_a_slow_link():
    # Room for two; the round trip lets four forwards run before the first backward can.
    c = equal(2, 6, 1.0, 1.0, 1.0, links=both_ways([4.0]), activation_budget=(2.0, 2.0))
    kept, remade = verified(c), verified(replace(c, recompute=True))
    assert kept.proven
    assert remade.proven
    assert any(op.kind is Kind.R for op in remade.schedule.order[0])
    assert remade.seconds < 0.8 * kept.seconds


def test_recompute_is_left_alone_where_it_costs():
    c = equal(3, 5, 1.0, 1.0, 1.0, recompute=True)
    assert all(op.kind is not Kind.R for line in verified(c).schedule.order for op in line)


def test_backwards_are_split_only_where_it_helps():
    """A whole backward spares the executor the two halves."""
    alone = verified(equal(1, 5, 1.0, 1.0, 1.0))
    assert {op.kind for op in alone.schedule.order[0]} == {Kind.F, Kind.B}
    order = verified(equal(3, 6, 1.0, 1.0, 1.0)).schedule.order
    assert {op.kind for op in order[2]} > {Kind.I, Kind.W}


@pytest.mark.parametrize("seconds", [(0, 0, 0), (1, 0, 0), (0, 1, 1), (1, 1, 0), (0, 0, 1)])
@pytest.mark.parametrize("budget", [math.inf, 1.5])
def test_ops_that_take_no_time(seconds, budget):
    c = equal(3, 4, *seconds, links=both_ways([1.0, 0.0]), activation_budget=(budget,) * 3)
    verified(c)
    verified(replace(c, split=False, recompute=True))
    verified(replace(c, links={}))


# --- against others ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_no_policy_is_faster(seed):
    c = replace(small_case(seed), split=True, activation_budget=())
    best = verified(c, time_limit=20)
    for policy in ("gpipe", "1f1b", "warmup", "zb-h1", "zb-h2"):
        assert best.bound <= best.seconds <= make_plan(c, policy).predicted * (1 + TIGHT)


@pytest.mark.long
def test_more_freedom_is_never_slower():
    for seed in range(12):
        c = replace(small_case(seed), split=False, recompute=False, activation_budget=())
        c = replace(c, activation_budget=(2.0,) * c.stages)
        least = verified(c).seconds
        for more in (
            {"split": True},
            {"recompute": True},
            {"activation_budget": (2.5,) * c.stages},
        ):
            assert verified(replace(c, **more)).bound <= least, f"seed {seed}"


@pytest.mark.parametrize("seed", range(3))
def test_interleaved_is_a_start_not_the_end(seed):
    rng = random.Random(seed)
    c = job(rng, 2, 4, chunks=2, split=False)
    assert verified(c).seconds <= make_plan(c, "interleaved").predicted * (1 + TIGHT)


# --- the stored optima ---------------------------------------------------------------------------


@pytest.mark.long
def test_the_stored_optima_are_those_of_the_cases():
    """A few are solved anew; the others have to be possible, by the simulator's own bound."""
    stored = json.loads(OPTIMA.read_text())
    assert list(map(int, stored)) == list(range(200))
    assert all(one["proven"] for one in stored.values())
    for seed, one in stored.items():
        warmup = make_plan(small_case(int(seed)), "warmup")
        assert one["seconds"] <= warmup.predicted * (1 + TIGHT), f"seed {seed}"
    for seed in (*range(0, 200, 8), 30):  # 30: its recomputes are not of successive microbatches
        found = verified(small_case(seed), time_limit=20)
        assert found.seconds == pytest.approx(stored[str(seed)]["seconds"], rel=NEAR), seed


# --- limits, hints, refusals ---------------------------------------------------------------------


def test_without_time_the_best_start_is_returned_and_says_so():
    c = equal(4, 8, 1.0, 1.0, 1.0, links=both_ways([0.0, 3.0, 0.0]))
    found = verified(c, time_limit=1e-6)
    policies = ("1f1b", "zb-h1", "zb-h2", "warmup")
    assert found.seconds == min(make_plan(c, policy).predicted for policy in policies)
    assert not found.proven
    assert "faster" in found.schedule.why


def test_a_hint_is_a_start_if_it_fits():
    c = equal(4, 8, 1.0, 1.0, 1.0, links=both_ways([0.0, 3.0, 0.0]), activation_budget=(4.0,) * 4)
    best = verified(c)
    hinted = verified(c, time_limit=1e-6, hint=best.schedule)
    assert hinted.seconds == best.seconds
    unfit = of_depths((8,) * 4, 8)
    assert verified(c, time_limit=1e-6, hint=unfit).seconds > best.seconds


def test_a_hint_that_is_not_looked_for_is_no_start():
    """However fast it is: microbatches out of order, or an op that the job does not allow."""
    c = equal(2, 3, 1.0, 1.0, 1.0, split=False)
    lines = "F1 F0 B1 F2 B0 B2", "F1 B1 F0 B0 F2 B2"
    odd = Schedule(tuple(parse_line(line.split()) for line in lines), 3)
    assert verified(c, hint=odd) == verified(c)
    c = equal(2, 6, 1.0, 1.0, 1.0, links=both_ways([4.0]), activation_budget=(2.0, 2.0))
    remade = verified(replace(c, recompute=True)).schedule
    assert verified(c, hint=remade) == verified(c)


@pytest.mark.long
def test_same_conditions_same_bytes():
    script = (
        "from small_cases import small_case; from exact import solve;"
        "print([solve(small_case(s)).schedule.digest() for s in (2, 9, 24, 37)])"
    )
    assert printed(script)


def test_what_is_not_modelled_is_refused():
    c = equal(2, 4, 1.0, 1.0, 1.0)
    with pytest.raises(BadInput, match=r"cores 1\.5"):
        solve(replace(c, cores=1.5))
    count = MOST_OPS // 6 + 1
    with pytest.raises(BadInput, match=rf"ops {6 * count}: .*{MOST_OPS}"):
        solve(equal(2, count, 1.0, 1.0, 1.0))
