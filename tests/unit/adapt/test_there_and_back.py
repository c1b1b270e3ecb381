"""Off Megatron's own messages and back to them, by what each kind of message really takes."""

from __future__ import annotations

import pytest
from adapt.hand_fed import COUNT, MS, STAGES, Job, Truth

from megatron_adaptra.ir.program import lower
from megatron_adaptra.plan.pipeline.fixed import first_schedule
from megatron_adaptra.sim.clock import simulate

SLOW = {(1, 2): 40 * MS, (2, 1): 40 * MS}


@pytest.mark.parametrize("wire_ms", [8, 20])
def test_it_goes_back_although_little_was_known_of_our_messages_before(wire_ms: int) -> None:
    """A link gets slow when two of ours have shown what their bytes take, too few to be sure."""
    job = Job(Truth(wire_ms * MS))
    assert job.train(3) == [job.start] * 3
    ran = job.train(20, slow={(1, 2): 80 * MS, (2, 1): 80 * MS})
    assert not ran[-1].stock, job.reasons
    ran = job.train(20, slow={})
    assert all(one.stock for one in ran[10:]), job.reasons


@pytest.mark.parametrize(
    "wire_ms", [1, 20, *(pytest.param(ms, marks=pytest.mark.long) for ms in (8, 12, 60))]
)
@pytest.mark.parametrize("where", [[(1, 2), (2, 1)], [(2, 3)]])
def test_a_healed_pipeline_goes_back_whatever_our_messages_take(
    wire_ms: int, where: list[tuple[int, int]]
) -> None:
    """40 ms three times; where ours would lose, stock stays."""
    job = Job(Truth(wire_ms * MS))
    healthy = job.seconds(job.start)
    assert job.train(20) == [job.start] * 20
    for _ in range(3):
        ran = job.train(20, slow=dict.fromkeys(where, 40 * MS))
        stock = job.seconds(job.start)
        assert job.seconds(ran[-1]) <= 1.001 * stock, job.reasons
        possible = job.rule.make_plan(job.truth.conditions(own=False))
        gain = 1 - possible.predicted / stock
        if abs(gain - job.rule.min_gain) > 0.02:  # not just on the edge
            assert ran[-1].stock == (gain < job.rule.min_gain), (gain, job.reasons)
        healed = len(job.ran)
        ran = job.train(20, slow={})
        assert all(one.stock for one in ran[10:]), job.reasons
        assert job.seconds(ran[-1]) == healthy
        assert job.remedy.stock().makespan == pytest.approx(healthy, rel=0.02)
        back = [c.plan.predicted for i, c in job.changes.items() if i >= healed]
        later = [seconds for i, seconds in job.predicted.items() if i >= healed + 10]
        assert later
        assert max(back + later) <= 1.001 * healthy, job.reasons


@pytest.mark.parametrize("sends", ["eager", "rendezvous"])
def test_stock_is_predicted_with_its_handshakes_where_ours_alone_are_measured(sends: str) -> None:
    job = Job(Truth(1 * MS), own=False, stock_sends=sends)
    job.train(20)
    job.train(20, slow=SLOW)
    program = lower(first_schedule(STAGES, COUNT, COUNT), 0)
    truth = simulate(program, job.truth.conditions(own=False), sends)
    assert job.remedy.stock().makespan == pytest.approx(truth.makespan, rel=0.02)


def test_a_link_that_is_slow_for_our_messages_alone_changes_nothing() -> None:
    job = Job(Truth(1 * MS, only=False))
    assert all(one.stock for one in job.train(20) + job.train(30, slow=SLOW)), job.reasons


def test_a_link_that_is_slow_for_megatrons_messages_alone_is_left_to_ours() -> None:
    """And not tried again at once: nobody can see how it does meanwhile."""
    job = Job(Truth(1 * MS, only=True))
    job.train(20)
    assert not job.train(40, slow=SLOW)[-1].stock, job.reasons
    ((_, why),) = job.reasons
    assert "for Megatron's messages, for ours " in why
