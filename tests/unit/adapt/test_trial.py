"""Measured iterations after a change of plan against those before: what was slower goes back."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from adapt.hand_fed import MS, Job, Truth
from measure.records import report
from seeding import new_seed

from megatron_adaptra.adapt.schedules.policy import Change, ReplanPolicy, Trials
from megatron_adaptra.adapt.trial import (
    AFTER,
    BEFORE,
    FIRST_BLOCK,
    LONGER,
    LONGEST_BLOCK,
    Backoff,
    History,
    Measured,
    Outcome,
    Trial,
    compare_iterations,
)
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.plan import Plan

SLOW = dict.fromkeys([(1, 2), (2, 1)], 40 * MS)
CONDITIONS = Truth(1 * MS).conditions(own=True)
PLAN = ReplanPolicy().make_plan(CONDITIONS)
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
    again = [job.changes[i - SWAP].again for i in back]
    assert again[:2] == [i - SWAP for i in there[1:]], "and the decision says when"
    job.train(150, slow={})
    assert len(job.swaps) == 6, "a healed link needs no plan once the block is over"


@pytest.mark.parametrize("what", [{"pace": 1.35}, {"hidden": 20 * MS}])
@pytest.mark.parametrize("longer", [6, 60])
def test_what_takes_longer_for_a_while_does_not_undo_a_plan_for_good(
    longer: int, what: dict[str, float]
) -> None:
    """It stays, where all stages take longer, and is tried again where nothing measures why."""
    job = Job(Truth(1 * MS))
    job.train(20)
    while job.train(1, slow=SLOW)[-1].stock:
        assert len(job.ran) < 30
    job.train(longer, **what)
    ran = job.train(2 * FIRST_BLOCK, pace=1.0, hidden=0.0)
    assert not any(one.stock for one in ran[-FIRST_BLOCK // 2 :]), job.reasons
    assert len(job.swaps) == 1 or "hidden" in what, job.reasons


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


@pytest.mark.parametrize("since", [0, 2])
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


def compared(
    seconds: Sequence[float], since: int, missing: Sequence[int] = (), control: float | None = None
) -> tuple[Outcome, Outcome] | None:
    """Iterations that take so many `seconds`, those after `since` with those before it."""
    history: History[Measured] = History()
    for i, one in enumerate(seconds):
        if i not in missing:
            history.add(i, Measured(one, control))
    return compare_iterations(*history.around(since))


def test_the_first_iteration_on_a_plan_and_two_outliers_do_not_count() -> None:
    seconds = [9.0, 1.0, 1.2, 50.0, 2.0, 30.0, 30.0, 2.1]
    for control in (None, 3.0):
        found = compared(seconds, 3, control=control)
        assert found == (Outcome(1.1, 2.1), Outcome(1.2, 2.0))
    assert compared(seconds[:-1], 3) is None
    for missing in (4, 5, 6, 7):
        assert compared(seconds, 3, [missing]) is None
    # Of those before, the last two that are known.
    assert compared(seconds, 3, [1]) == (Outcome(5.1, 2.1), Outcome(9.0, 2.0))
    assert compared(seconds, 3, [0, 1]) is None


@pytest.mark.parametrize("longer", [6, 20, 60])
def test_a_control_that_takes_longer_for_a_while_puts_the_comparison_off(longer: int) -> None:
    """The first iterations with the change are no evidence; the last ones are."""
    trial, history = Trial(3, Backoff()), History[Measured]()
    for i in range(3 + longer + AFTER + 2):
        assert trial.failed is None or i > 3 + longer + 1, i
        long = 2.0 if 3 < i <= 3 + longer else 1.0
        history.add(i, Measured(1.0 if i < 3 else 3.0, long))
        trial.judge(i, *history.around(3))
    assert trial.failed == Outcome(1.0, 3.0)


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
        found = compared(seconds, BEFORE)
        assert found is not None
        outcome, _ = found
        wrong += ReplanPolicy().slower(outcome, 0.85 * outcome.before)
    assert wrong <= 20


def undone(seconds: Sequence[float], stages: Sequence[float], halves: float = 0.0) -> int | None:
    """Of a plan that is expected to take as long as the one before, the iteration that undoes it.

    It comes into force after BEFORE + 1 of the `seconds` of iterations. `stages`: seconds that a
    microbatch takes in each of them. `halves`: seconds of the plan's backward in two halves.
    """
    trials: Trials[Plan, Conditions] = Trials(PLAN.schedule, ReplanPolicy())
    for i, last in enumerate([None, *seconds]):
        if i == BEFORE:
            trials.swapped(Change("", PLAN, PLAN, CONDITIONS), BEFORE)
        wall = {"F": stages[min(i, len(stages) - 1)], "B": 0.0}
        if i >= BEFORE and halves:
            wall |= {"B": 0.0, "I": halves / 2, "W": halves / 2}
        trials.observe(i, [report(0, iteration=i, wall=wall)], last, changed=False)
        if trials.slower is not None:
            return i
    return None


def test_a_machine_that_gets_a_little_busier_undoes_nothing() -> None:
    """Milliseconds as the demo has measured them: stages took longer, and iterations more so."""
    seconds = [51.0, 50.0, 52.0, 58.0, 60.0, 63.0, 63.0, 46.0, 45.0, 70.0, 107.0, 150.0, 138.0]
    stages = [8.0, 7.0, 8.0, 8.0, 7.0, 8.0, 8.0, 7.0, 8.0, 10.0, 15.0, 27.0, 22.0]
    assert undone(seconds, stages) is None


@pytest.mark.parametrize(("longer", "in_vain"), [(1.0, 0), (1.0, 2), (1.05, 0)])
def test_what_is_longer_than_each_iteration_before_is_undone(longer: float, in_vain: int) -> None:
    """However much these have differed; not as long as one or two are not."""
    seconds = [1.0, 1.2, 9.0, *[1.3] * in_vain, *[1.5 * longer] * AFTER]
    stages = [1.0] * BEFORE + [longer] * (1 + in_vain + AFTER)
    assert undone(seconds, stages) == len(seconds)
    assert undone([*seconds[:-1], 1.3], stages) is None


def test_halves_that_take_longer_than_whole_backwards_are_no_excuse() -> None:
    seconds = [1.0] * (BEFORE + 1) + [1.5] * AFTER
    assert undone(seconds, [1.0], halves=0.5) == len(seconds)


def test_what_stages_take_longer_explains_as_much_of_an_iteration() -> None:
    seconds = [1.0, 1.0, 9.0, *[1.2] * AFTER]
    assert undone(seconds, [1.0]) == len(seconds)
    assert undone(seconds, [*[1.0] * BEFORE, *[1.06] * 9]) is None


def test_on_a_busy_machine_equal_plans_are_hardly_ever_undone() -> None:
    """Of 20 % of standard deviation, and a third of them half as long again, or twice as long.

    By their medians alone every sixth would be.
    """
    rng, wrong = random.Random(new_seed()), 0
    for _ in range(1000):
        seconds = [
            rng.lognormvariate(0.0, 0.2) * rng.choice([1.0, 1.0, 1.0, 1.0, 1.5, 2.0])
            for _ in range(BEFORE + 1 + AFTER + LONGER)
        ]
        wrong += undone(seconds, [1.0]) is not None
    assert wrong <= 100


def test_a_plan_back_may_be_as_much_slower_as_it_was_expected_to_be() -> None:
    rule = ReplanPolicy(min_gain=0.15)
    assert not rule.slower(Outcome(1.0, 1.2), expected=1.1)
    assert rule.slower(Outcome(1.0, 1.3), expected=1.1)
    assert rule.slower(Outcome(1.0, 1.06), expected=0.8)


def test_each_failure_blocks_for_twice_as_long_until_one_is_long_after() -> None:
    backoff, lengths, now = Backoff(), [], 100
    for _ in range(9):
        backoff.failed(now)
        lengths.append(sum(backoff.blocks(i) for i in range(now, now + 10_000)))
        now = backoff.until + AFTER
    assert lengths[:3] == [FIRST_BLOCK, 2 * FIRST_BLOCK, 4 * FIRST_BLOCK]
    assert lengths[-1] == LONGEST_BLOCK
    now = backoff.until + LONGEST_BLOCK  # in force for as long as it was not
    backoff.failed(now)
    assert backoff.until == now + FIRST_BLOCK
