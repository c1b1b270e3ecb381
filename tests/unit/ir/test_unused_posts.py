"""Clearing the links of an iteration that is not to be: both ends count the same messages."""

import random

import pytest
from ir.served import assert_served
from seeding import new_seed

from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.program import lower, unused_posts
from megatron_adaptra.ir.schedule import Schedule, warmup_line
from megatron_adaptra.plan.pipeline.fixed import interleaved


def test_posts_before_anything_runs_are_served():
    rng = random.Random(new_seed())
    found = 0
    for _ in range(300):
        stages, microbatches = rng.randint(2, 6), rng.randint(1, 12)
        depths = sorted((rng.randint(1, microbatches) for _ in range(stages)), reverse=True)
        schedule = Schedule(tuple(warmup_line(d, microbatches) for d in depths), microbatches)
        found += len(assert_served(lower(schedule, rng.choice([None, 0, 1, 2, 5]))))
    assert found


@pytest.mark.parametrize("ahead", [None, 0, 3])
@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (3, 2), (4, 3)])
def test_posts_of_several_chunks_are_served_round_the_ring(stages, chunks, ahead):
    even = (1.0,) * stages
    conditions = Conditions(2 * stages, even, even, even, chunks=chunks)
    assert assert_served(lower(interleaved(conditions, "eager", None), ahead))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_known_case(stage):
    schedule = Schedule(tuple(warmup_line(d, 4) for d in (3, 2, 1)), 4)
    unused = unused_posts(lower(schedule, 2), stage)
    words = [*map(str, unused.to_send), "|", *map(str, unused.to_discard)]
    assert " ".join(words) == KNOWN[stage]


KNOWN = (
    "SF0 SF1 SF2 | PB0 PB1",
    "SB0 SB1 SF0 SF1 SF2 | PF0 PF1 PB0 PB1 PF2",
    "SB0 SB1 | PF0 PF1 PF2",
)
