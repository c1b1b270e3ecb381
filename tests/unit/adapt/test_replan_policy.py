"""Which plan the replan loop makes, and what it is worth."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_adaptra.adapt.schedules.policy import ReplanPolicy
from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.plan import Plan

MS = 1e-3
SLOW = Conditions(
    microbatches=12, forward=(10 * MS,) * 4, backward_input=(10 * MS,) * 4,
    backward_weight=(10 * MS,) * 4, links={(1, 2): LinkState(40 * MS), (2, 1): LinkState(40 * MS)},
    activation_budget=(6.0, 5.0, 4.0, 3.0),
)  # fmt: skip


def halves(plan: Plan) -> bool:
    return any(op.kind is Kind.W for line in plan.schedule.order for op in line)


def test_backwards_in_halves_have_room_of_their_own():
    usual, careful = (ReplanPolicy(policy="adaptive", halves=n) for n in (0.0, 1.5))
    assert halves(usual.make_plan(SLOW))
    plan = careful.make_plan(SLOW)
    rooms = zip(plan.peak_in_flight, SLOW.activation_budget, strict=True)
    assert not halves(plan) or all(held <= budget - 1.5 for held, budget in rooms)
    assert plan.predicted >= usual.make_plan(SLOW).predicted


def test_without_that_room_a_backward_stays_in_one_piece():
    tight = replace(SLOW, activation_budget=(6.0, 5.0, 4.0, 2.0))
    assert halves(ReplanPolicy(policy="adaptive").make_plan(tight))
    assert not halves(ReplanPolicy(policy="adaptive", halves=1.5).make_plan(tight))


def test_with_room_for_all_halves_are_as_ever():
    wide = replace(SLOW, activation_budget=(30.0,) * 4)
    usual, careful = (ReplanPolicy(policy="adaptive", halves=n).make_plan(wide) for n in (0.0, 1.5))
    assert halves(careful)
    assert careful.predicted == pytest.approx(usual.predicted)
