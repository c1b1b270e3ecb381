"""Four ways to guess the next seconds of a line, each by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_adaptra.telemetry.forecast import FORECASTS, HORIZON


def after(name, samples):
    line = FORECASTS[name]()
    for seconds in samples:
        line.add(seconds)
    return line.value()


@pytest.mark.parametrize("name", FORECASTS)
def test_nothing_is_known_before_the_first_sample(name):
    assert after(name, []) == 0


@pytest.mark.parametrize("name", FORECASTS)
@given(st.floats(1e-6, 1e3), st.integers(1, 40))
def test_what_does_not_change_goes_on(name, seconds, count):
    assert after(name, [seconds] * count) == pytest.approx(seconds)


@pytest.mark.parametrize("name", FORECASTS)
@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=40))
def test_whatever_came_the_value_is_above_zero(name, samples):
    assert 0 < after(name, samples) < 1e5


def test_after_a_step():
    samples = [1.0] * 20 + [2.0] * 3
    assert after("last", samples) == 2
    assert after("ewma", samples) == pytest.approx(2 - 0.7**3)
    assert after("median", samples) == 1  # three of eight
    assert after("median", [*samples, 2.0, 2.0]) == 2


def test_one_spike():
    samples = [1.0] * 20 + [11.0]
    assert after("last", samples) == 11
    assert after("ewma", samples) == pytest.approx(4)
    assert after("median", samples) == 1


def test_a_trend_goes_on():
    """Growing by 0.01 s an iteration; on average of the horizon it is half of that ahead."""
    samples = [1 + 0.01 * i for i in range(200)]
    ahead = samples[-1] + 0.01 * (HORIZON + 1) / 2
    assert after("holt", samples) == pytest.approx(ahead, rel=1e-3)
    assert all(after(name, samples) < samples[-1] + 1e-9 for name in ("last", "ewma", "median"))
    falling = [max(0.01, 5 - 0.5 * i) for i in range(11)]
    assert after("holt", falling) > 0
