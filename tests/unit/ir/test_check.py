"""`check` accepts what can run and refuses what cannot; the oracle is a cycle search in a graph."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ir.graph import runs
from ir.strategies import of_depths, random_depths, random_schedule, seeds

from megatron_adaptra.base.errors import BadInput, ScheduleError
from megatron_adaptra.ir.check import SENDS, check
from megatron_adaptra.ir.op import Op
from megatron_adaptra.ir.program import Program, lower
from megatron_adaptra.ir.schedule import Schedule, parse_line


def schedule(*rows: str, count: int, chunks: int = 1) -> Schedule:
    return Schedule(tuple(parse_line(row.split()) for row in rows), count, chunks)


def refusal(program: Program, budget=()) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(program, budget)
    return str(caught.value)


@given(seeds, st.integers(1, 6), st.integers(1, 16))
def test_warmup_schedules_run(seed, stages, count):
    depths = random_depths(random.Random(seed), stages, count)
    check(lower(of_depths(depths, count)), depths)


@given(seeds, st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
def test_any_order_that_respects_its_inputs_runs(seed, stages, count, chunks):
    rng = random.Random(seed)
    s = random_schedule(rng, stages, count, chunks, split=0.5, again=0.3)
    check(lower(s, ahead=count * chunks))


@given(seeds, st.integers(1, 4), st.integers(1, 4), st.integers(1, 2), st.integers(0, 4))
def test_check_finds_exactly_the_deadlocks(seed, stages, count, chunks, ahead):
    rng = random.Random(seed)
    s = random_schedule(rng, stages, count, chunks, split=0.5, again=0.3)
    order = [list(line) for line in s.order]
    for _ in range(rng.randint(0, 2)):
        line = rng.choice(order)
        line.insert(rng.randrange(len(line)), line.pop(rng.randrange(len(line))))
    program = lower(Schedule(tuple(map(tuple, order)), count, chunks), ahead)
    deadlocking = [sends for sends in SENDS if not runs(program, sends)]
    if not deadlocking:
        check(program)
    else:
        text = refusal(program)
        assert f"deadlock under {deadlocking[0]} sends" in text
        assert text.count("stage ") >= stages
        assert "cannot run" in text


def test_a_repeated_op():
    text = refusal(lower(schedule("F0 F0 B0", count=1)))
    assert "F0 stands 2 times on stage 0" in text
    assert "F0 [F0] B0   <-- F0 is repeated" in text


@pytest.mark.parametrize("missing", ["F1", "B1"])
def test_a_missing_op(missing):
    line = [word for word in ("F0", "F1", "B0", "B1") if word != missing]
    text = refusal(lower(schedule(" ".join(line), count=2)))
    assert f"runs {'F' if missing == 'B1' else 'B'} of microbatch 1" in text
    assert "<--" in text


@pytest.mark.parametrize("row", ["F0 I0", "F0 W0", "F0 B0 W0", "F0 B0 I0 W0", "F0", "", "R0 B0"])
def test_a_microbatch_needs_both_halves_or_the_whole(row):
    assert "it has to run F with B, or F with I and W" in refusal(
        Program((parse_line(row.split()),), 1)
    )


@pytest.mark.parametrize("row", ["F0 B0 F1 B1", "F0 B0 F0.1 B0.1"])
def test_what_does_not_exist(row):
    text = refusal(lower(schedule(row, count=1)))
    assert "microbatches are 0 to 0, chunks 0 to 0" in text
    assert f"[{row.split()[2]}]" in text


def test_a_chunk_left_out():
    assert "microbatch 0 of chunk 1" in refusal(lower(schedule("F0 B0", count=1, chunks=2)))


def test_warmup_that_increases_towards_the_last_stage_deadlocks():
    text = refusal(lower(of_depths((1, 2), 2)))
    assert "deadlock under eager sends" in text
    assert "<-- B0 cannot run" in text
    assert "<-- F1 cannot run" in text


def test_1f1b_with_receives_posted_late_deadlocks_under_rendezvous_only():
    """Stage 0 is held sending F1, while stage 1, yet to post F1, is held sending B0.

    This is why Megatron sends and receives in one batch.
    """
    program = lower(of_depths((2, 1), 4), ahead=0)
    assert runs(program, "eager")
    text = refusal(program)
    assert "deadlock under rendezvous sends: SF1 of stage 0 can never run" in text
    assert "[SF1] PB0 B0" in text
    assert "[SB0] PF1 F1" in text
    check(lower(of_depths((2, 1), 4)))


def test_every_stuck_stage_is_pointed_at():
    text = refusal(lower(schedule("F0 B0 F1 B1", "F0 F1 B0 B1", count=2)))
    head, *rows = text.splitlines()
    assert "can never run" in head
    assert ["cannot run" in row for row in rows] == [True, True]
    assert "<-- B0 cannot run" in rows[0]
    assert "<-- F1 cannot run" in rows[1]


def test_sends_and_posts_have_to_pair_up():
    good = lower(of_depths((2, 1), 2))
    check(good)
    lone = Program((good.order[0], tuple(o for o in good.order[1] if str(o) != "PF1")), 2)
    assert "SF1 of stage 0 has no posted receive" in refusal(lone)
    unsent = Program((tuple(o for o in good.order[0] if str(o) != "SF1"), good.order[1]), 2)
    assert "PF1 of stage 1 awaits what nobody sends" in refusal(unsent)


def test_a_post_behind_its_use_deadlocks():
    first, second = lower(of_depths((1, 1), 1)).order
    assert [str(op) for op in second] == ["PF0", "F0", "B0", "SB0"]
    late = (second[1], second[0], *second[2:])
    assert refusal(Program((first, late), 1)).startswith(
        "deadlock under eager sends: F0 of stage 1 can never run"
    )


def test_the_budget():
    program = lower(of_depths((3, 2), 4))
    check(program, (3, 2))
    text = refusal(program, (3, 1))
    assert "stage 1 holds 2 microbatches' activations, its budget is 1" in text
    assert "<-- F1 exceeds the budget" in text
    refusal(program, (float("nan"), 2))
    for wrong in ((3,), (3, 2, 1)):
        with pytest.raises(BadInput, match="budget"):
            check(program, wrong)


def test_the_budget_points_at_the_recompute_that_exceeds_it():
    program = lower(schedule("F0 F1 F2 R0 R1 B0 B1 B2", count=3))
    text = refusal(program, (2.05,))
    assert "holds 3 microbatches' activations" in text
    assert "<-- R1 exceeds the budget" in text


SPLIT = schedule("F0 F1 I0 W0 I1 W1", "F0 I0 F1 I1 W0 W1", count=2)
RECOMPUTED = schedule("F0 F1 R0 B0 B1", "F0 B0 F1 R1 B1", count=2)
CHUNKS = schedule(
    "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1", "F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1", count=2, chunks=2
)


@pytest.mark.parametrize("good", [SPLIT, RECOMPUTED, CHUNKS])
def test_small_schedules_of_every_kind(good):
    check(lower(good))


def test_lowered_by_hand():
    program = lower(SPLIT)
    assert [" ".join(map(str, line)) for line in program.order] == [
        "PB0 PB1 F0 SF0 F1 SF1 I0 W0 I1 W1",
        "PF0 PF1 F0 I0 SB0 F1 I1 SB1 W0 W1",
    ]
    late = lower(SPLIT, ahead=0)
    assert " ".join(map(str, late.order[1])) == "PF0 F0 I0 SB0 PF1 F1 I1 SB1 W0 W1"
    wrap = lower(CHUNKS, ahead={})
    assert "F0 SF0 F1 SF1 PF1.1 F0.1 SF0.1" in " ".join(map(str, wrap.order[0]))


def test_ahead_cannot_be_negative():
    with pytest.raises(BadInput, match="ahead"):
        lower(SPLIT, ahead=-1)


@pytest.mark.parametrize(
    ("bad", "op"),
    [
        (schedule("F0 W0 I0", count=1), "W0"),
        (schedule("F0 B0 R0", count=1), "B0"),
        (schedule("R0 F0 B0", count=1), "R0"),
        (schedule("F0.1 F0 B0.1 B0", count=1, chunks=2), "F0.1"),
        (schedule("F0 F0.1 B0 B0.1", count=1, chunks=2), "B0"),
    ],
)
def test_an_op_before_what_it_needs(bad, op):
    text = refusal(lower(bad))
    assert text.startswith(f"deadlock under eager sends: {op} of stage 0 can never run")
    assert f"[{op}]" in text


def test_an_op_from_another_replica_is_not_ours():
    text = refusal(Program(((Op.parse("F0@1"), Op.parse("B0@1")),), 1))
    assert "F0@1 on stage 0: ops of one replica have no home" in text
