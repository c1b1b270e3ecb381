"""Schedules that a job starts with: they run, and recompute what was asked for."""

import math

import pytest

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.check import check
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import peak_in_flight
from megatron_adaptra.plan.pipeline.initial import starting_schedule, trial

SHAPES = [(s, m) for s in (2, 3, 4, 8) for m in (1, s - 1, s, 3 * s)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("policy", ["adaptive", "1f1b", "zb-h1", "zb-h2", "interleaved"])
def test_every_schedule_runs_and_recomputes_what_it_should(policy, recompute):
    for stages, count in SHAPES:
        chunks = 2 if policy == "interleaved" else 1
        if chunks > 1 and count % stages:
            continue
        shape = policy, stages, count, chunks, math.inf
        schedule, plain = (starting_schedule(*shape, again) for again in (recompute, False))
        check(lower(schedule))
        last = stages * chunks - 1
        for stage, line in enumerate(schedule.order):
            without = tuple(op for op in line if op.kind is not Kind.R)
            assert without == plain.order[stage]
            again = {op[1:] for op in line if op.kind is Kind.R}
            for op in without:
                if op.kind not in (Kind.B, Kind.I):
                    continue
                forward = without[without.index(op) - 1] == op._replace(kind=Kind.F)
                at_last = op.chunk * stages + stage == last
                wanted = recompute and policy != "adaptive" and not forward and not at_last
                assert (op[1:] in again) is wanted
                if wanted:
                    assert line[line.index(op) - 1] == Op(Kind.R, *op[1:])
            assert peak_in_flight(line, chunks) <= peak_in_flight(plain.order[stage], chunks)


def test_recompute_leaves_one_microbatch_of_many():
    deep = starting_schedule("1f1b", 8, 24, 1, math.inf, True)
    assert peak_in_flight(deep.order[0]) == pytest.approx(1 + 7 * 0.05)


def test_a_shape_that_a_policy_does_not_have_is_refused():
    with pytest.raises(BadInput, match="microbatches 7"):
        starting_schedule("interleaved", 4, 7, 2, math.inf, False)
    with pytest.raises(BadInput, match="chunks"):
        starting_schedule("zb-h1", 4, 8, 2, math.inf, False)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_trial_runs_every_kind_of_op_once_in_the_same_memory(split, recompute):
    for stages, count in SHAPES:
        start = starting_schedule("adaptive", stages, count, 1, math.inf, False)
        schedule = trial(start, split, recompute)
        check(lower(schedule))
        for line, before in zip(schedule.order, start.order, strict=True):
            first = [op for op in line if op.microbatch == 0]
            words = f"F {'R ' * recompute}{'I W' if split else 'B'}".split()
            assert [op.kind.value for op in first] == words
            assert [op for op in line if op.microbatch] == [op for op in before if op.microbatch]
            assert peak_in_flight(line) <= peak_in_flight(before)
