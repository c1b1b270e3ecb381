"""The step of the next iterations, from what the last ones did."""

import pytest

from megatron_adaptra.measure.report import Collective, Step
from megatron_adaptra.measure.step_sync import StepSyncModel

MS = 1e-3


def step(seconds, *collectives):
    return Step(seconds, tuple(Collective(*row) for row in collectives))


def slow(delay):
    return {(0, 1): 0.0, (2, 3): delay, (3, 2): delay / 2}


def model(*rows, delay=0.0):
    """Each row: seconds of the step, then (taken, backend, direct) of its collectives.

    `delay`: of the slowest link at the time.
    """
    made = StepSyncModel()
    for seconds, *collectives in rows:
        named = [
            (f"all_reduce {i}", *crossing, (), False) for i, crossing in enumerate(collectives)
        ]
        made.update(step(seconds, *named), slow(delay))
    return made


def test_nothing_is_known_of_no_step():
    made = StepSyncModel()
    assert (made.work, made.sync(slow(0.1)), made.native(slow(0.1))) == (0.0, (), ())


def test_work_is_what_remains_without_the_crossings():
    made = model((200 * MS, (160 * MS, 160 * MS, -1.0)), (60 * MS, (40 * MS, 160 * MS, 40 * MS)))
    assert made.work == pytest.approx((40 + 20) / 2 * MS)


def test_collectives_that_were_never_tried_take_a_delay_but_for_the_first():
    """The stage that is the last to get there need not wait for the others."""
    crossing = (160 * MS, 160 * MS, -1.0)
    assert model((200 * MS, crossing), delay=30 * MS).sync(slow(30 * MS)) == ()
    made = model((400 * MS, crossing, crossing, crossing), delay=30 * MS)
    assert made.sync(slow(30 * MS)) == pytest.approx((30 * MS, 30 * MS))
    assert made.native(slow(30 * MS)) == pytest.approx((160 * MS,) * 3)


def test_the_backend_serves_where_it_is_faster():
    assert model((9 * MS, (1 * MS, 1 * MS, 5 * MS))).sync(slow(0.0)) == pytest.approx((1 * MS,))
    assert model((9 * MS, (1 * MS, 1 * MS, -1.0))).sync(slow(0.0)) == ()


def test_a_backend_that_was_measured_before_the_link_got_slow():
    made = model((5 * MS, (1 * MS, 1 * MS, 1 * MS)))
    assert made.native(slow(40 * MS)) == pytest.approx((160 * MS,))


def test_a_collective_that_was_measured_before_the_link_got_slow():
    """The backend is in use since, and its cost is measured."""
    made = model((5 * MS, (1 * MS, 1 * MS, 1 * MS), (1 * MS, 1 * MS, 1 * MS)))
    now = (160 * MS, 160 * MS, 1 * MS)
    collectives = [(f"all_reduce {i}", *now, (), False) for i in range(2)]
    made.update(step(330 * MS, *collectives), slow(40 * MS))
    assert sum(made.sync(slow(40 * MS))) == pytest.approx(41 * MS)
    assert made.native(slow(40 * MS)) == pytest.approx((160 * MS, 160 * MS))
    assert sum(made.sync(slow(0.0))) <= 2 * MS


def test_a_backend_that_is_slow_before_the_link_is_known_to_be():
    made = model((170 * MS, (161 * MS, 161 * MS, 1 * MS)))
    assert made.native(slow(40 * MS)) == pytest.approx((161 * MS,))


def test_what_a_link_takes_that_has_healed():
    made = model((170 * MS, (161 * MS, 161 * MS, 41 * MS)), delay=40 * MS)
    assert made.native(slow(0.0)) == pytest.approx((1 * MS,))


def test_a_collective_that_was_measured_over_a_slow_link_and_takes_less_is_not_in_doubt():
    row = (50 * MS, (9 * MS, 160 * MS, 9 * MS), (41 * MS, 160 * MS, 41 * MS))
    assert sum(model(row, delay=40 * MS).sync(slow(40 * MS))) == pytest.approx(50 * MS)


def test_what_nobody_waits_for_takes_no_time_and_is_not_the_first():
    row = (50 * MS, (0.0, 160 * MS, 0.0), (0.0, 160 * MS, -1.0), (41 * MS, 160 * MS, -1.0))
    made = model(row, delay=40 * MS)
    assert made.sync(slow(40 * MS)) == pytest.approx((40 * MS,))
    assert made.native(slow(40 * MS)) == pytest.approx((160 * MS,) * 3)


def test_what_is_known_last_holds_for_all_iterations_of_the_window():
    made = model((9 * MS, (1 * MS, 1 * MS, 1 * MS)))
    crossing = ("all_reduce 0", 40 * MS, 160 * MS, 40 * MS, (), False)
    made.update(step(50 * MS, crossing), slow(40 * MS))
    assert made.sync(slow(40 * MS)) == pytest.approx((40 * MS,))


def test_what_came_along_with_another_is_free_for_us_and_not_for_stock():
    row = (50 * MS, (40 * MS, 160 * MS, 40 * MS), (0.0, 160 * MS, 0.0))
    made = model(row, row, delay=40 * MS)
    assert made.sync(slow(40 * MS)) == pytest.approx((40 * MS,))
    assert made.native(slow(40 * MS)) == pytest.approx((160 * MS, 160 * MS))


def test_iterations_that_are_logged_count_by_their_share():
    plain = (10 * MS, (4 * MS, 16 * MS, 4 * MS))
    logged = (22 * MS, *[(4 * MS, 16 * MS, 4 * MS)] * 4)
    made = model(plain, plain, logged, plain, plain, logged)
    assert made.work == pytest.approx(6 * MS)
    assert sum(made.sync(slow(0.0))) == pytest.approx(8 * MS)
    assert len(made.sync(slow(0.0))) == 2


def test_a_slow_link_is_not_between_those_who_take_part():
    made = StepSyncModel()
    ends = ("all_reduce 0", 1 * MS, 4 * MS, 1 * MS, [0, 3], False)
    all_stages = ("all_reduce 1", 1 * MS, 1 * MS, 1 * MS, [0, 1, 2, 3], False)
    made.update(step(5 * MS, ends, all_stages), slow(0.0))
    assert sum(made.native(slow(40 * MS))) == pytest.approx(164 * MS)
    assert sum(made.native({(0, 3): 40 * MS})) == pytest.approx(320 * MS)


def test_what_the_backend_keeps_takes_what_it_takes_there_and_nobody_waits_for_less():
    """On a device: the tied embedding's gradients, and a scalar, and the link gets slow."""
    made = StepSyncModel(None)
    for delay, seconds in ((0.0, 1 * MS), (40 * MS, 80 * MS)):
        kept = ("all_reduce of 262144", seconds, seconds, -1.0, (0, 1), True)
        scalar = ("all_reduce 0", seconds, seconds, -1.0, (), False)
        link = {(0, 1): delay, (1, 0): delay}
        made.update(step(9 * MS + 2 * seconds, kept, scalar), link)
    assert made.work == pytest.approx(9 * MS)
    assert made.sync({(0, 1): 40 * MS}) == pytest.approx((80 * MS,))
    assert made.native({(0, 1): 40 * MS}) == pytest.approx((80 * MS, 80 * MS))
