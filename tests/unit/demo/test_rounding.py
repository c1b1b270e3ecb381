"""When differences between the demo's arms are rounding, and when they are a fault."""

from __future__ import annotations

import math

import pytest

from megatron_adaptra.demo.rounding import Differences, sums_change
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan.pipeline.fixed import first_schedule

SAME = [{"stock": "a", "adaptra": "a"}] * 4
OTHER = [*SAME[:3], {"stock": "a", "adaptra": "b"}]
HOME = first_schedule(2, 4, math.inf).replicated(2)
SWAPPED = Schedule((HOME.order[0], HOME.order[3], HOME.order[2], HOME.order[1]), 4, replicas=2)
# Microbatch 3 of replica 1 runs at stage 1 on replica 0.
MOVED = Schedule(
    (
        HOME.order[0],
        HOME.order[1] + tuple(op for op in HOME.order[3] if op.microbatch == 3),
        HOME.order[2],
        tuple(op for op in HOME.order[3] if op.microbatch != 3),
    ),
    4, replicas=2,
)  # fmt: skip
# Replica 0 runs all of stage 1.
BOTH = HOME.order[1] + HOME.order[3]
GATHERED = Schedule((HOME.order[0], BOTH, HOME.order[2], ()), 4, replicas=2)


def test_sums_change_where_a_worker_adds_what_two_have_added() -> None:
    assert not sums_change(HOME)
    assert not sums_change(SWAPPED), "a + b = b + a"
    assert sums_change(MOVED)
    assert sums_change(GATHERED)
    three = first_schedule(2, 4, math.inf).replicated(3)
    assert not sums_change(three)
    lines = list(three.order)
    lines[1], lines[3] = lines[3], lines[1]
    assert sums_change(Schedule(tuple(lines), 4, replicas=3)), "of three the order shows"


@pytest.mark.parametrize(
    ("ours", "digests", "plans", "rounding"),
    [
        ([4.0, 3.0], SAME, [MOVED], None),
        ([4.0, 3.0 * (1 + 1e-7)], OTHER, [MOVED, HOME], True),
        ([4.0, 3.0], OTHER, [MOVED], True),
        ([4.0, 3.0 * (1 + 1e-7)], OTHER, [SWAPPED], False),
        ([4.0, 3.0 * (1 + 1e-7)], OTHER, [], False),
        ([4.0, 3.0 * (1 + 1e-3)], OTHER, [MOVED], False),
        ([4.0, math.nan], OTHER, [MOVED], False),
    ],
)
def test_only_moved_microbatches_explain_a_small_difference(
    ours: list[float], digests: list[dict[str, str]], plans: list[Schedule], rounding: bool | None
) -> None:
    losses = {"stock": [4.0, 3.0], "adaptra": ours}
    found = Differences.between(losses, digests, [0.0, 1e-9], plans, "fp32")
    assert found.equal_to_rounding is rounding
    keeps = all(plan in (HOME, SWAPPED) for plan in plans)
    masked = Differences.between(losses, digests, [0.0, 1e-9], plans, "fp32", dropout=0.1)
    assert masked.equal_to_rounding is (rounding if keeps else None), "dropout went by home"
    summed = Differences.between(losses, digests, [0.0, 1e-9], plans, "fp32", reduced=True)
    near = ours[1] / 3.0 - 1 < 1e-5
    assert summed.equal_to_rounding is (None if rounding is None else near), "gradients were"
    assert found.losses_identical is (ours == losses["stock"])
    assert found.parameters_identical is (digests is SAME)
    assert found.parameters_difference == 1e-9
    wanted = math.inf if math.isnan(ours[1]) else ours[1] / 3.0 - 1
    assert found.losses_difference == pytest.approx(wanted, rel=2e-3)
