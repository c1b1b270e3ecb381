"""Both ends of every message name each other, and the op that made it."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from ir.strategies import random_schedule, seeds

from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.program import Exchange, Neighbours, lower
from megatron_adaptra.ir.routes import Routes


def exchange(stage: int, stages: int, op: str) -> tuple[str, int]:
    made, peer = Neighbours(stage, Routes(stages)).exchange(Op.parse(op))
    return str(made), peer


def test_the_stages_before_and_after():
    assert exchange(1, 3, "SF4") == ("F4", 2)
    assert exchange(1, 3, "SB4") == ("B4", 0)
    assert exchange(1, 3, "PF4") == ("F4", 0)
    assert exchange(1, 3, "PB4") == ("B4", 2)


def test_with_chunks_the_last_stage_and_the_first_are_neighbours():
    assert exchange(2, 3, "SF4") == ("F4", 0)
    assert exchange(0, 3, "PF4.1") == ("F4", 2)
    assert exchange(0, 3, "SB4.1") == ("B4.1", 2)
    assert exchange(2, 3, "PB4") == ("B4.1", 0)


@settings(max_examples=100)
@given(seeds, st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3)))
def test_every_send_has_its_post(seed, shape):
    program = lower(random_schedule(random.Random(seed), *shape, split=0.5))
    sends, posts = [], []
    for stage, line in enumerate(program.order):
        neighbours = Neighbours(stage, program.routes)
        for op in line:
            if op.kind in (Kind.SEND_F, Kind.SEND_B):
                made, peer = neighbours.exchange(op)
                assert (made.microbatch, made.chunk) == (op.microbatch, op.chunk)
                sends.append((stage, peer, made))
            elif op.kind in (Kind.POST_F, Kind.POST_B):
                made, peer = neighbours.exchange(op)
                posts.append((peer, stage, made))
    assert len(set(sends)) == len(sends)
    assert sorted(sends) == sorted(posts)


def test_one_message_is_one_value():
    assert Neighbours(1, Routes(3)).exchange(Op.parse("PF4")) == Exchange(Op(Kind.F, 4), 0)
