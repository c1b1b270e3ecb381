"""StragglAR: every rank has the sum, and the rounds of powers of two are those of the paper."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.in_memory import random_buffers, run_in_memory

from megatron_adaptra.errors import BadInput
from megatron_adaptra.plan.collectives.stragglar import copies, stragglar


@given(st.integers(4, 17), st.integers(1, 3), st.integers(0, 16), st.integers(0, 2**32 - 1))
def test_every_rank_has_the_same_sum(ranks, k, late, seed):
    plan = stragglar(ranks, late % ranks, k)
    rng = random.Random(seed)
    buffers = [[rng.randint(-99, 99) for _ in range(61)] for _ in range(ranks)]
    sums = [sum(column) for column in zip(*buffers, strict=True)]
    assert run_in_memory(plan, buffers, seed) == [sums] * ranks
    ended = run_in_memory(plan, random_buffers(rng, ranks, 20), seed)
    assert ended == [ended[0]] * ranks


@pytest.mark.parametrize("steps", range(2, 8))
def test_rounds_at_powers_of_two(steps):
    rounds = copies(1 << steps, 1)
    assert len(rounds) == (1 << steps) - 2 + steps
    for now, copied in enumerate(rounds):
        busy = [now, (1 << steps) - 1] if now < (1 << steps) - 1 else []
        sources = busy + [source for source, _, _ in copied]
        targets = busy + [target for _, target, _ in copied]
        assert len(set(sources)) == len(sources)
        assert len(set(targets)) == len(targets)


@pytest.mark.parametrize("bad", [(3, 0, 1), (4, 4, 1), (4, 0, 0), (4, True, 1)])
def test_bad_input_is_named(bad):
    with pytest.raises(BadInput, match=r"^(ranks|late rank|k) "):
        stragglar(*bad)
