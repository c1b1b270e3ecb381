"""The known schedules: their published bubbles and memory, and the order Megatron itself runs."""

import json
import math
import os
import random
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from bubbles import (
    gpipe_seconds,
    interleaved_seconds,
    one_f_one_b_seconds,
    zb_h1_seconds,
    zb_h2_seconds,
)
from hypothesis import given
from hypothesis import strategies as st
from pairwise import covering
from seeding import new_seed

from benchmarks.common import both_ways
from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.check import check
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.plan import Plan, make_plan

HERE = Path(__file__).parent
ONE_CHUNK = ("gpipe", "1f1b", "warmup", "zb-h1", "zb-h2")
BASELINES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2")
STAGES = range(1, 6)
COUNTS = range(1, 13)
# Every pair of whole numbers, so that sums are exact.
TIMES = [tuple(row.values()) for row in covering(dict.fromkeys("fiw", (1, 2, 4)), lambda row: True)]


def equal_stages(stages: int, count: int, f: float, i: float, w: float, chunks: int = 1):
    times = ((seconds,) * stages for seconds in (f, i, w))
    return Conditions(count, *times, chunks=chunks)


def plan(policy: str, *shape: float, chunks: int = 1) -> Plan:
    return make_plan(equal_stages(*shape, chunks=chunks), policy)


def shapes(policy: str) -> list[tuple[int, int, int]]:
    """Stages, microbatches, chunks."""
    if policy != "interleaved":
        return [(p, m, 1) for p in STAGES for m in COUNTS]
    return [(p, p * g, v) for p in range(2, 6) for g in (1, 2, 3) for v in (2, 3, 4)]


# --- they run, and take what their papers say ----------------------------------------------------


@pytest.mark.parametrize("policy", BASELINES)
def test_every_shape_runs_under_both_kinds_of_sends(policy):
    for stages, count, chunks in shapes(policy):
        made = plan(policy, stages, count, 1, 1, 1, chunks=chunks)
        check(made.program)  # tries eager and rendezvous
        assert made.schedule.policy == policy


@pytest.mark.parametrize("policy", BASELINES)
def test_gradients_of_the_weights_are_summed_in_microbatch_order(policy):
    """Else the parameters would differ from Megatron's in the last bits."""
    for stages, count, chunks in shapes(policy):
        for line in plan(policy, stages, count, 1, 1, 1, chunks=chunks).schedule.order:
            for chunk in range(chunks):
                last = [op for op in line if op.kind in (Kind.B, Kind.W) and op.chunk == chunk]
                assert [op.microbatch for op in last] == list(range(count))


@pytest.mark.parametrize(
    ("policy", "formula"), [("gpipe", gpipe_seconds), ("1f1b", one_f_one_b_seconds)]
)
def test_gpipe_and_1f1b_take_what_the_formula_says(policy, formula):
    for p, m, (f, i, w) in product(STAGES, COUNTS, TIMES):
        assert plan(policy, p, m, f, i, w).predicted == formula(p, m, f, i + w)


@pytest.mark.long
def test_interleaved_takes_what_the_formula_says():
    for (p, m, v), (f, i, w) in product(shapes("interleaved"), TIMES):
        made = plan("interleaved", p, m, v * f, v * i, v * w, chunks=v)
        assert made.predicted == interleaved_seconds(p, m, v * f, v * (i + w), v)


def test_zb_h1_takes_what_the_formula_says():
    for p, m, (f, i, w) in product(STAGES, COUNTS, TIMES):
        if m >= p and w <= min(f, i):
            assert plan("zb-h1", p, m, f, i, w).predicted == zb_h1_seconds(p, m, f, i, w)


def test_zb_h2_takes_what_the_formula_says():
    for p, m, (f, i, w) in product(STAGES, COUNTS, TIMES):
        if m >= 2 * p - 1 and w <= f and 2 * w <= f + i:
            seen = plan("zb-h2", p, m, f, i, w).timeline.iteration
            assert seen == zb_h2_seconds(p, m, f, i, w)


# --- memory --------------------------------------------------------------------------------------


def test_activations_held():
    """I gives back a half, so a stage that owes `delay` weight gradients holds half of each."""
    for p, m in product(STAGES, COUNTS):
        stock = plan("1f1b", p, m, 1, 1, 1).peak_in_flight
        assert stock == tuple(min(p - i, m) for i in range(p))
        assert plan("gpipe", p, m, 1, 1, 1).peak_in_flight == (m,) * p
        h1 = plan("zb-h1", p, m, 1, 1, 1).peak_in_flight
        # Not stage by stage, as later stages owe more, but no device needs more than the first.
        assert max(h1) == max(stock)
        if m >= p:
            assert h1 == tuple(p - i / 2 for i in range(p))
        h2 = plan("zb-h2", p, m, 1, 1, 1).peak_in_flight
        assert max(h2) == min(2 * p - 1, m)
        if m >= 2 * p - 1:
            assert h2 == tuple(2 * p - 1 - i for i in range(p))


# --- what Megatron runs --------------------------------------------------------------------------


@pytest.mark.cold
def test_1f1b_and_interleaved_are_what_megatron_runs():
    """Its own schedule function, once per rank; it also refuses what we refuse."""
    jobs = [(p, m, 1) for p in range(2, 6) for m in (1, 3, 4, 7, 12)]
    jobs += [(p, m, v) for p in (2, 3, 4) for m in range(1, 13) for v in (2, 3)]
    jobs += [(4, 32, 2), (8, 16, 2), (2, 4, 6)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "megatron_order.py")],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # the stand-ins are for the CPU
    )
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    refused = 0
    for (p, m, v), order in zip(jobs, theirs, strict=True):
        conditions = equal_stages(p, m, 1, 1, 1, chunks=v)
        policy = "1f1b" if v == 1 else "interleaved"
        if isinstance(order, str):
            refused += 1
            with pytest.raises(BadInput, match=f"microbatches {m}: .* here {p}"):
                make_plan(conditions, policy)
        else:
            ours = make_plan(conditions, policy).schedule
            assert [[str(op) for op in line] for line in ours.order] == order, (p, m, v)
    assert refused == sum(v > 1 and m % p > 0 for p, m, v in jobs) > 20


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted({*ONE_CHUNK} - {"warmup"}))
def test_planners_of_one_chunk_refuse_more(policy):
    with pytest.raises(BadInput, match=r"chunks 2: .*interleaved and adaptive"):
        plan(policy, 2, 4, 1, 1, 1, chunks=2)


@pytest.mark.long
@pytest.mark.parametrize("sends", ["eager", "rendezvous"])
def test_a_deeper_interleaved_warmup_keeps_megatrons_order_and_is_no_slower(sends):
    rng = random.Random(new_seed())
    faster = 0
    for _ in range(12):
        stages, chunks = rng.randint(2, 5), rng.randint(2, 3)
        link, delay = rng.randrange(stages - 1), rng.choice([0.0, 1.0, 5.0])
        even = (1.0,) * stages
        budget = (rng.choice([math.inf, 3.0 * stages]),) * stages
        conditions = Conditions(
            stages * rng.randint(2, 4), even, even, even, both_ways({link: delay}),
            activation_budget=budget, chunks=chunks, split=False,
        )  # fmt: skip
        stock = make_plan(conditions, "interleaved", sends)
        found = make_plan(conditions, "warmup", sends)
        check(found.program, budget)
        for ours, theirs in zip(found.schedule.order, stock.schedule.order, strict=True):
            for kind in (Kind.F, Kind.B):
                assert [op for op in ours if op.kind is kind] == [
                    op for op in theirs if op.kind is kind
                ]
        assert found.predicted <= stock.predicted
        faster += found.predicted < 0.9 * stock.predicted
    assert faster, "some of these links are worth it"


def test_interleaved_refuses_a_single_chunk_and_a_single_stage():
    with pytest.raises(BadInput, match=r"chunks 1: .*1f1b"):
        plan("interleaved", 2, 4, 1, 1, 1)
    with pytest.raises(BadInput, match=r"stages 1: .*at least 2"):
        plan("interleaved", 1, 4, 1, 1, 1, chunks=2)


@pytest.mark.parametrize("policy", ["zb-h1", "zb-h2"])
def test_zero_bubble_needs_backwards_in_halves(policy):
    whole = Conditions(4, (1.0,) * 2, (1.0,) * 2, (1.0,) * 2, split=False)
    with pytest.raises(BadInput, match=r"split False: .*1f1b"):
        make_plan(whole, policy)


@given(st.sampled_from(BASELINES), st.integers(2, 5), st.integers(1, 4), st.integers(2, 3))
def test_a_plan_does_not_depend_on_the_times(policy, p, groups, v):
    """Baselines are what they are; only `adaptive` and its like look at the links."""
    chunks = v if policy == "interleaved" else 1
    even = plan(policy, p, p * groups, 1, 1, 1, chunks=chunks)
    odd = plan(policy, p, p * groups, 3, 0.5, 7, chunks=chunks)
    assert even.schedule == odd.schedule
