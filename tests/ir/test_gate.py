"""Clearing the links of an iteration that is begun anew: both ends count the same messages."""

import random
from collections import Counter
from itertools import pairwise

import pytest

from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.deps import carried
from megatron_adaptra.ir.gate import first_messages, first_posts, gate_of
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Schedule, warmup_line
from megatron_adaptra.plan.interleaved import interleaved


def programs(count):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(count):
        stages, microbatches = rng.randint(2, 6), rng.randint(1, 12)
        depths = sorted((rng.randint(1, microbatches) for _ in range(stages)), reverse=True)
        schedule = Schedule(tuple(warmup_line(d, microbatches) for d in depths), microbatches)
        yield lower(schedule, rng.choice([None, 0, 1, 2, 5]))


def number(ops, kind):
    return Counter(op.microbatch for op in ops if op.kind is kind)


def test_every_receive_that_is_posted_gets_one_message_and_no_message_is_left():
    for program in programs(300):
        gates = [gate_of(program, s) for s in range(program.stages)]
        begun = [
            line[: line.index(gate.op)] for line, gate in zip(program.order, gates, strict=True)
        ]
        for s, (gate, line) in enumerate(zip(gates, begun, strict=True)):
            assert not any(op.kind in (Kind.B, Kind.SEND_B) for op in line)
            last = s == program.stages - 1
            assert gate.op.kind is (Kind.F if last else Kind.B)
        for up, down in pairwise(range(program.stages)):
            sent = number(begun[up], Kind.SEND_F) + number(gates[up].messages.owed, Kind.SEND_F)
            taken = number(begun[down], Kind.F) + number(gates[down].messages.void, Kind.POST_F)
            assert sent == taken
            assert number(begun[down], Kind.POST_F) <= taken
            back = number(gates[down].messages.owed, Kind.SEND_B)
            assert back == number(gates[up].messages.void, Kind.POST_B)
            assert back == number(begun[up], Kind.POST_B)


def test_posts_before_anything_runs_are_served():
    for program in programs(100):
        for up, down in pairwise(range(program.stages)):
            sides = first_messages(program, up), first_messages(program, down)
            for sender, receiver, send, post in (
                (*sides, Kind.SEND_F, Kind.POST_F), (*sides[::-1], Kind.SEND_B, Kind.POST_B),
            ):  # fmt: skip
                assert number(sender.owed, send) == number(receiver.void, post)
            first = first_posts(program, down)
            assert number(sides[1].void, Kind.POST_F) == number(first, Kind.POST_F)


@pytest.mark.parametrize("ahead", [None, 0, 3])
@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (3, 2), (4, 3)])
def test_posts_of_several_chunks_are_served_round_the_ring(stages, chunks, ahead):
    even = (1.0,) * stages
    conditions = Conditions(2 * stages, even, even, even, chunks=chunks)
    program = lower(interleaved(conditions, "eager", None), ahead)
    sides = [first_messages(program, s) for s in range(stages)]
    sent, awaited = Counter(), Counter()
    for s, side in enumerate(sides):
        sent.update(carried(op, s, stages) for op in side.owed)
        awaited.update(carried(op, s, stages) for op in side.void)
        assert set(first_posts(program, s)) <= set(side.void)
    assert sent == awaited
    assert all(count == 1 for count in sent.values())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_known_case(stage):
    schedule = Schedule(tuple(warmup_line(d, 4) for d in (3, 2, 1)), 4)
    gate = gate_of(lower(schedule, 2), stage)
    words = [str(gate.op), *map(str, gate.messages.owed), "|", *map(str, gate.messages.void)]
    assert (
        " ".join(words)
        == {
            0: "B0 SF3 | PB0 PB1 PB2",
            1: "B0 SB0 SB1 SB2 SF2 | PB0 PB1 PB2 PF2 PF3",
            2: "F0 SB0 SB1 SB2 | PF0 PF1 PF2",
        }[stage]
    )
