"""The tail of the next iterations, from what the last ones did."""

import pytest

from megatron_adaptra.telemetry.tails import TailModel

MS = 1e-3


def model(*rows):
    """Each row: seconds of the tail, then (taken, backend, direct) of its crossings."""
    made = TailModel()
    for seconds, *crossings in rows:
        named = [(f"all_reduce {i}", *crossing) for i, crossing in enumerate(crossings)]
        made.update({"seconds": seconds, "crossings": named})
    return made


def test_nothing_is_known_of_no_tail():
    made = TailModel()
    assert (made.work, made.exchanges(0.1), made.native(0.1)) == (0.0, (), ())


def test_work_is_what_remains_without_the_crossings():
    made = model((200 * MS, (160 * MS, 160 * MS, -1.0)), (60 * MS, (40 * MS, 160 * MS, 40 * MS)))
    assert made.work == pytest.approx((40 + 20) / 2 * MS)


def test_exchanges_that_were_never_tried_take_a_delay_but_for_the_first():
    """The stage that is the last to get there need not wait for the others."""
    crossing = (160 * MS, 160 * MS, -1.0)
    assert model((200 * MS, crossing)).exchanges(30 * MS) == ()
    made = model((400 * MS, crossing, crossing, crossing))
    assert made.exchanges(30 * MS) == pytest.approx((30 * MS, 30 * MS))
    assert made.native(30 * MS) == pytest.approx((160 * MS,) * 3)


def test_the_backend_serves_where_it_is_faster():
    assert model((9 * MS, (1 * MS, 1 * MS, 5 * MS))).exchanges(0.0) == pytest.approx((1 * MS,))
    assert model((9 * MS, (1 * MS, 1 * MS, -1.0))).exchanges(0.0) == ()


def test_a_backend_that_was_measured_before_the_link_got_slow():
    made = model((50 * MS, (41 * MS, 1 * MS, 41 * MS)))
    assert made.native(40 * MS) == pytest.approx((160 * MS,))


def test_an_exchange_that_was_measured_before_the_link_got_slow():
    """The backend was in use; what it takes now tells."""
    made = model((330 * MS, (160 * MS, 160 * MS, 1 * MS), (160 * MS, 160 * MS, 1 * MS)))
    assert made.exchanges(40 * MS) == pytest.approx((40 * MS,))
    assert made.exchanges(0.0) == pytest.approx((1 * MS, 1 * MS))


def test_what_is_known_last_holds_for_all_iterations_of_the_window():
    made = model((9 * MS, (1 * MS, 1 * MS, 1 * MS)), (50 * MS, (40 * MS, 160 * MS, 40 * MS)))
    assert made.exchanges(40 * MS) == pytest.approx((40 * MS,))


def test_what_came_along_with_another_exchange_is_free_for_us_and_not_for_stock():
    row = (50 * MS, (40 * MS, 160 * MS, 40 * MS), (0.0, 160 * MS, 0.0))
    assert model(row, row).exchanges(40 * MS) == pytest.approx((40 * MS,))
    assert model(row, row).native(40 * MS) == pytest.approx((160 * MS, 160 * MS))


def test_iterations_that_are_logged_count_by_their_share():
    plain = (10 * MS, (4 * MS, 16 * MS, 4 * MS))
    logged = (22 * MS, *[(4 * MS, 16 * MS, 4 * MS)] * 4)
    made = model(plain, plain, logged, plain, plain, logged)
    assert made.work == pytest.approx(6 * MS)
    assert sum(made.exchanges(0.0)) == pytest.approx(8 * MS)
    assert len(made.exchanges(0.0)) == 2
