"""The simulator against closed forms, values worked out by hand and a second simulator."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ir.strategies import of_depths, random_conditions, random_depths, random_schedule, seeds
from plan.bubbles import one_f_one_b_seconds
from sim.reference import reference_seconds

from megatron_adaptra.base.errors import BadInput, ScheduleError
from megatron_adaptra.ir.check import SENDS
from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.program import Program, lower
from megatron_adaptra.ir.schedule import Schedule, parse_line
from megatron_adaptra.plan.pipeline.fixed import stock_warmup
from megatron_adaptra.sim.clock import simulate
from megatron_adaptra.sim.warmup import WarmupClock

both_sends = st.sampled_from(SENDS)


def job(stages, count, links=None, forward=1.0, half=1.0, rest=1.0, **more) -> Conditions:
    def each(x):
        return (x,) * stages

    more = {"split": False, **more}
    return Conditions(count, each(forward), each(half), each(rest), links or {}, **more)


def schedule(*rows: str, count: int, chunks: int = 1) -> Schedule:
    return Schedule(tuple(parse_line(row.split()) for row in rows), count, chunks)


def starts(timeline) -> dict[str, float]:
    return {f"{s.stage}:{s.op}": s.start for s in timeline.spans}


# --- closed form ---------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(1, 24), st.integers(0, 9), st.integers(0, 9), both_sends)
def test_1f1b_is_the_closed_form(stages, count, forward, half, sends):
    # Whole numbers below 2**53 add up exactly.
    c = job(stages, count, forward=float(forward), half=float(half), rest=3.0)
    program = lower(of_depths(stock_warmup(stages, count), count))
    timeline = simulate(program, c, sends)
    assert timeline.makespan == one_f_one_b_seconds(stages, count, forward, half + 3.0)
    assert timeline.busy(0) == count * (forward + half + 3)


# --- by hand: two stages, F takes 1, B takes 2 ----------------------------------------------------

TWO = of_depths((2, 1), 2)  # F0 F1 B0 B1 | F0 B0 F1 B1


def test_two_healthy_stages():
    timeline = simulate(lower(TWO), job(2, 2))
    assert starts(timeline) == {
        "0:F0": 0, "0:F1": 1, "1:F0": 1, "1:B0": 2, "1:F1": 4, "0:B0": 4, "1:B1": 5, "0:B1": 7,
    }  # fmt: skip
    assert timeline.makespan == 9


def test_messages_of_one_link_go_one_after_another():
    # A message holds the link for 4: the two activations leave at 5 and 9 and arrive 2 later.
    c = job(2, 2, {(0, 1): LinkState(2.0, 0.25)}, message_bytes=1.0)
    timeline = simulate(lower(TWO), c)
    assert [(str(m.op), m.sent, m.arrived) for m in timeline.messages if m.source == 0] == [
        ("SF0", 1, 7),
        ("SF1", 2, 11),
    ]
    assert starts(timeline)["1:F1"] == 11
    assert timeline.makespan == 11 + 1 + 2 + 2


def test_rendezvous_with_receives_posted_late_pays_the_word_every_time():
    c = job(2, 2, {(1, 0): LinkState(5.0)})
    timeline = simulate(lower(TWO, ahead=0), c, "rendezvous")
    # Stage 1 posts F0 at 0 (there at 5); F1 not before B0 is done at 8 (there at 13).
    assert starts(timeline)["1:F0"] == 5
    assert starts(timeline)["1:F1"] == 13
    # B1 is done at 16 and there at 21, as its receive was posted when B0 arrived, at 13.
    assert starts(timeline)["0:B0"] == 13
    assert timeline.makespan == 21 + 2


def test_a_message_that_is_ready_first_leaves_first():
    # Stage 0 sends F0 then F1, stage 1 awaits F1 first: F0 is posted only at F1's turn.
    s = schedule("F0 F1 B1 B0", "F1 B1 F0 B0", count=2)
    c = job(2, 2, {(1, 0): LinkState(3.0), (0, 1): LinkState(0.0, 0.5)}, message_bytes=1.0)
    timeline = simulate(lower(s, ahead=1), c, "rendezvous")
    assert [str(m.op) for m in timeline.messages if m.source == 0] == ["SF1", "SF0"]


def test_two_stages_on_one_core_take_the_sum():
    c = job(2, 2, cores=1.0)
    assert simulate(lower(TWO), c).makespan == 2 * 2 * 3
    alone = simulate(lower(TWO), job(2, 2, cores=2.0))
    assert alone == simulate(lower(TWO), job(2, 2))


def test_shared_cores_slow_only_what_runs_together():
    # 0 to 1: F0 alone. Then stage 0's F1 and stage 1's F0 share until 3, and B0 runs alone to 5.
    timeline = simulate(lower(TWO), job(2, 2, cores=1.0))
    ends = {f"{s.stage}:{s.op}": s.end for s in timeline.spans}
    assert (ends["0:F0"], ends["0:F1"], ends["1:F0"], ends["1:B0"]) == (1, 3, 3, 5)


def test_a_stage_that_waits_in_its_ops_leaves_its_core_to_others():
    # Stage 1 needs a core for half of each op: it waits first, then both may have to share.
    c = job(2, 2, cores=1.0, core_share=(1.0, 0.5))
    timeline = simulate(lower(TWO), c)
    ends = {f"{s.stage}:{s.op}": s.end for s in timeline.spans}
    # F1 has the core to 1.5, when F0 of stage 1 has waited its half; then each has half of it.
    assert (ends["0:F0"], ends["0:F1"], ends["1:F0"]) == (1, 2.5, 2.5)
    assert simulate(lower(TWO), replace(c, core_share=(1.0, 0.0))).makespan == 9
    assert simulate(lower(TWO), replace(c, cores=None)) == simulate(lower(TWO), job(2, 2))


def test_the_step_follows_the_last_op_on_every_stage():
    timeline = simulate(lower(TWO), job(2, 2, step_seconds=4.0))
    steps = [(s.stage, s.start, s.end) for s in timeline.spans if s.op.kind is Kind.STEP]
    assert steps == [(0, 9, 13), (1, 9, 13)]
    assert timeline.makespan == 13
    assert timeline.busy(1) == 6


def test_collectives_are_ops_at_the_end_of_the_step():
    timeline = simulate(lower(TWO), job(2, 2, step_seconds=4.0, step_sync=(1.0, 2.0)))
    ends = [(str(s.op), s.start, s.end) for s in timeline.spans if s.stage == 1][-3:]
    assert ends == [("T0", 9, 10), ("X0", 10, 11), ("X1", 11, 13)]
    assert (timeline.makespan, timeline.pipeline) == (13, 9)


# --- misuse --------------------------------------------------------------------------------------


def test_a_program_that_cannot_finish():
    with pytest.raises(ScheduleError, match="never finish"):
        simulate(lower(of_depths((1, 2), 2)), job(2, 2))


def test_wrong_arguments():
    with pytest.raises(BadInput, match="sends"):
        simulate(lower(TWO), job(2, 2), "slowly")
    with pytest.raises(BadInput, match="stages"):
        simulate(lower(TWO), job(3, 2))


# --- properties ----------------------------------------------------------------------------------


def any_program(rng: random.Random, most: int = 4) -> Program:
    stages, count, chunks = rng.randint(1, most), rng.randint(1, 5), rng.randint(1, 2)
    s = random_schedule(rng, stages, count, chunks, split=0.5, again=0.3)
    return lower(s, rng.choice([None, 0, 1, 2, 9]))


@given(seeds, both_sends)
def test_agrees_with_the_reference(seed, sends):
    rng = random.Random(seed)
    program = any_program(rng)
    c = random_conditions(
        rng, program.stages, program.microbatches, step_seconds=rng.choice([0.0, 2.0])
    )
    c = with_a_port(rng, c)
    assert simulate(program, c, sends).makespan == pytest.approx(
        reference_seconds(program, c, sends), rel=1e-12
    )


@given(seeds, both_sends, st.none() | st.floats(0.5, 7))
def test_the_warmup_clock_is_the_simulator_to_the_last_bit(seed, sends, cores):
    rng = random.Random(seed)
    stages, count = rng.randint(1, 6), rng.randint(1, 12)
    c = random_conditions(rng, stages, count, cores=cores, step_seconds=rng.choice([0.0, 0.3]))
    if rng.random() < 0.5:
        c = replace(c, core_share=tuple(rng.random() for _ in range(stages)))
    c = with_a_port(rng, c)
    clock = WarmupClock(c, sends)
    for _ in range(8):
        depths = random_depths(rng, stages, count)
        assert clock.seconds(depths) == simulate(lower(of_depths(depths, count)), c, sends).makespan


def with_a_port(rng: random.Random, c: Conditions) -> Conditions:
    """Half of the jobs have a stage whose links share what its port passes."""
    if rng.random() < 0.5:
        return c
    return replace(c, ports={rng.randrange(c.stages): rng.uniform(0.1, 2)})


def slower(rng: random.Random, c: Conditions) -> Conditions:
    """The same job with one cost, delay or bandwidth worse."""
    name = rng.choice(["forward", "backward_input", "backward_weight", "links", "step_seconds"])
    if name == "step_seconds":
        return replace(c, step_seconds=c.step_seconds + rng.uniform(0, 5))
    if name == "links":
        way = rng.randrange(c.stages), rng.randrange(c.stages)
        if way[0] == way[1]:
            return c
        link = c.link(*way)
        if rng.random() < 0.5:
            worse = LinkState(link.delay + rng.uniform(0, 20), link.bandwidth)
        else:
            worse = LinkState(link.delay, min(link.bandwidth, 9.0) * rng.uniform(0.2, 1))
        return replace(c, links={**c.links, way: worse})
    values = list(getattr(c, name))
    values[rng.randrange(c.stages)] += rng.uniform(0, 5)
    return replace(c, **{name: tuple(values)})


@given(seeds, both_sends)
def test_nothing_gets_faster_when_something_gets_slower(seed, sends):
    """Not so with shared cores, where a slow op may let a more urgent one run alone, nor where
    rendezvous lets messages of one link overtake each other."""
    rng = random.Random(seed)
    stages, count = rng.randint(1, 5), rng.randint(1, 8)
    if sends == "eager" and rng.random() < 0.5:
        program = any_program(rng)
        stages, count = program.stages, program.microbatches
    else:
        program = lower(of_depths(random_depths(rng, stages, count), count))
    c = random_conditions(rng, stages, count)
    before = simulate(program, c, sends).makespan
    for _ in range(4):
        c = slower(rng, c)
        after = simulate(program, c, sends).makespan
        assert after >= before * (1 - 1e-12)
        before = after


@given(seeds, both_sends)
def test_ops_of_a_stage_never_overlap(seed, sends):
    rng = random.Random(seed)
    program = any_program(rng)
    c = random_conditions(rng, program.stages, program.microbatches, cores=rng.choice([None, 1.5]))
    timeline = simulate(program, c, sends)
    for stage, line in enumerate(program.order):
        spans = [s for s in timeline.spans if s.stage == stage]
        assert [s.op for s in spans] == [op for op in line if op.kind.computes]
        assert all(a.end <= b.start for a, b in pairwise(spans))
    assert simulate(program, c, sends) == timeline
