"""Measured iterations after a change of plan against those before: what was slower goes back."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from runtime.hand_fed import MS, Job, Truth
from seeding import new_seed
from telemetry.records import report

from megatron_adaptra.runtime.replan_policy import ReplanPolicy
from megatron_adaptra.runtime.trial import (
    AFTER,
    BEFORE,
    FIRST_BLOCK,
    LONGEST_BLOCK,
    Backoff,
    History,
    Outcome,
)

SLOW = dict.fromkeys([(1, 2), (2, 1)], 40 * MS)
SWAP, WITHIN = 2, 2 + AFTER + 2  # iterations from a proposal to its swap, and until it is undone


def test_a_plan_that_loses_goes_back_and_is_tried_again_after_a_while() -> None:
    """What nothing measures holds ops up: 12 % slower than stock."""
    job = Job(Truth(1 * MS, hidden=20 * MS))
    job.train(20)
    job.train(FIRST_BLOCK + 2 * FIRST_BLOCK + 30, slow=SLOW)
    there, back = job.swaps[::2], job.swaps[1::2]
    assert len(there) == len(back) == 3, job.reasons
    assert [b - a for a, b in zip(there, back, strict=True)] == [WITHIN - 1] * 3
    blocked = [b - a for a, b in zip(back, there[1:], strict=False)]
    assert blocked == [FIRST_BLOCK, 2 * FIRST_BLOCK]
    lost, stock = 1e3 * job.seconds(job.ran[there[0]]), 1e3 * job.seconds(job.start)
    why = job.changes[back[0] - SWAP].why
    assert f"take {lost:.4g} ms, on the plan before {stock:.4g} ms: back to Megatron's own" in why
    assert job.changes[back[0] - SWAP].plan.predicted == pytest.approx(stock / 1e3)
    job.train(150, slow={})
    assert len(job.swaps) == 6, "a healed link needs no plan once the block is over"


def test_a_plan_that_wins_stays() -> None:
    job = Job(Truth(1 * MS, hidden=10 * MS))  # 9 % faster than stock, where 30 % were promised
    job.train(20)
    job.train(FIRST_BLOCK, slow=SLOW)
    assert len(job.swaps) == 1, job.reasons


def test_links_that_change_while_plans_are_blocked_are_planned_for_afterwards() -> None:
    """What held ops up is gone, but only the end of the block shows it."""
    job = Job(Truth(1 * MS, hidden=40 * MS))
    job.train(20)
    job.train(20, slow=SLOW)
    (_, back) = job.swaps
    worse = dict.fromkeys(SLOW, 80 * MS)
    job.train(FIRST_BLOCK, slow=worse, hidden=0.0)
    (again,) = [i for i in job.swaps if i > back]
    assert again == back + FIRST_BLOCK
    change = job.changes[again - SWAP]
    assert set(change.links) == set(SLOW)
    assert change.conditions.link(1, 2).delay == pytest.approx(80 * MS, rel=0.05)
    job.train(20)
    assert job.swaps[-1] == again, job.reasons


def test_a_way_back_that_is_refused_is_proposed_again() -> None:
    job = Job(Truth(1 * MS, hidden=20 * MS))
    job.train(20)
    job.train(6, slow=SLOW)
    job.refused = 2
    job.train(14)
    assert [c.undoes is not None for c in job.changes.values()] == [False, True, True, True]
    assert len(job.swaps) == 2
    assert job.ran[-1].stock


@pytest.mark.parametrize("since", [0, 1, 2])
def test_nothing_is_decided_where_a_link_has_changed_meanwhile(since: int) -> None:
    """It got slower right after the swap, and that is why iterations are."""
    job = Job(Truth(1 * MS))
    job.train(20)
    job.train(3 + since, slow=SLOW)
    job.train(30, slow=dict.fromkeys(SLOW, 400 * MS))
    assert not [why for _, why in job.reasons if why.startswith("iterations")], job.reasons


def test_nothing_is_decided_where_the_stages_have_become_slower() -> None:
    job = Job(Truth(1 * MS))
    job.train(20)
    job.train(3, slow=SLOW)
    job.train(30, pace=2.0)
    assert len(job.swaps) == 1, job.reasons
    assert job.seconds(job.ran[-1]) > 1.3 * Truth(1 * MS, SLOW).run(job.start).makespan


def history(seconds: Sequence[float], missing: Sequence[int] = ()) -> History:
    out = History()
    for i, last in enumerate([None, *seconds]):
        if i not in missing:
            out.add(i, [report(0, iteration=i, wall={"F": 1.0, "B": 2.0})], last)
    return out


def test_the_first_iteration_on_a_plan_and_two_outliers_do_not_count() -> None:
    seconds = [9.0, 1.0, 1.2, 50.0, 2.0, 30.0, 30.0, 2.1]
    assert history(seconds).compare(3) == Outcome(1.1, 2.1)
    assert history(seconds[:-1]).compare(3) is None
    for missing in range(1, 9):
        assert history(seconds, [missing]).compare(3) is None


def test_stages_that_take_longer_for_a_moment_put_the_comparison_off() -> None:
    """The first iterations on the plan are no evidence; the last ones are."""
    out = History()
    for i in range(14):
        long = 2.0 if 5 <= i < 9 else 1.0
        out.add(i, [report(0, iteration=i, wall={"F": long, "B": long})], 1.0 if i <= 3 else 3.0)
        if 8 <= i < 12:
            assert out.compare(3) is None, i
    assert out.compare(3) == Outcome(1.0, 3.0)


def test_iterations_that_only_jitter_are_not_slower() -> None:
    """5 % of standard deviation, and a tenth of them half as long again."""
    rng, wrong = random.Random(new_seed()), 0
    for _ in range(2000):
        seconds = [
            rng.lognormvariate(0.0, 0.05) * (1.5 if rng.random() < 0.1 else 1.0)
            for _ in range(BEFORE + 1 + AFTER)
        ]
        for i in range(BEFORE, len(seconds)):
            seconds[i] *= 0.85  # what a plan has to gain
        outcome = history(seconds).compare(BEFORE)
        assert outcome is not None
        wrong += ReplanPolicy().slower(*outcome, 0.85 * outcome.before)
    assert wrong <= 20


def test_a_plan_back_may_be_as_much_slower_as_it_was_expected_to_be() -> None:
    rule = ReplanPolicy(min_gain=0.15)
    assert not rule.slower(1.0, 1.2, expected=1.1)
    assert rule.slower(1.0, 1.3, expected=1.1)
    assert rule.slower(1.0, 1.06, expected=0.8)


def test_each_failure_blocks_for_twice_as_long_until_one_passes() -> None:
    backoff, lengths = Backoff(), []
    for _ in range(9):
        backoff.failed(100)
        lengths.append(sum(backoff.blocks(i) for i in range(100, 100_000)))
    assert lengths[:3] == [FIRST_BLOCK, 2 * FIRST_BLOCK, 4 * FIRST_BLOCK]
    assert lengths[-1] == LONGEST_BLOCK
    backoff.passed()
    backoff.failed(0)
    assert backoff.blocks(FIRST_BLOCK - 1)
    assert not backoff.blocks(FIRST_BLOCK)
