"""The chart of one link: changes that matter are confirmed soon, noise is not."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measure.records import noise

from megatron_adaptra.measure.detect import BASELINE, DelayChart

MS = 1e-3
STAGE = 10 * MS
SEED = 20251126  # fixed: a rate of false alarms is never quite zero
# Link delays from negligible to several times what a stage takes.
REGIMES = [(0.1 * MS, 20 * MS), (2 * MS, 20 * MS), (2 * MS, 2 * MS), (10 * MS, 5 * MS)]


def steady(level: float, count: int = 10, stage: float = STAGE, lasting: int = 0) -> DelayChart:
    chart = DelayChart(lasting=lasting)
    for _ in range(count):
        chart.update(level, stage)
    if chart.level == 0.0:
        chart.accept(stage)
    return chart


def confirmed(chart: DelayChart, samples, stage: float = STAGE) -> list[int]:
    """The samples, from 1 on, at which a change was confirmed; each is accepted."""
    out = []
    for i, sample in enumerate(samples, 1):
        if chart.update(sample, stage):
            out.append(i)
            chart.accept(stage)
    return out


@pytest.mark.parametrize(("base", "stage"), REGIMES)
@pytest.mark.parametrize("sigma", [0.05, 0.25])
def test_noise_is_no_change(base, stage, sigma):
    """In the worst regime 0.16 false alarms per 1000 iterations were counted, else none."""
    rng, alarms, count = random.Random(SEED), 0, 0
    for _ in range(8):
        chart, samples = DelayChart(), noise(rng, base, 1500, sigma)
        confirmed(chart, [next(samples) for _ in range(BASELINE)], stage)
        alarms += len(confirmed(chart, samples, stage))
        count += 1500
    print(f"seed {SEED}: {alarms} false alarms in {count} iterations")
    assert alarms <= 4


def test_a_stage_that_was_slow_once_hides_no_later_change():
    """While it took 20 times as long, 4 ms meant nothing."""
    chart = steady(0.1 * MS, 200, 20 * STAGE)
    assert confirmed(chart, [4 * MS] * 10, 20 * STAGE) == []
    chart = steady(0.1 * MS, 200, 20 * STAGE)
    assert confirmed(chart, [4 * MS] * 10) == [2]


def alarmed(rng, rows: int, extra: float, count: int) -> list[list[int]]:
    """Of `rows` links of 2 ms, the iterations from 1 on that are alarmed once they get slower."""
    found = []
    for _ in range(rows):
        chart, samples = DelayChart(), noise(rng, 2 * MS, 120 + count, 0.25)
        for _ in range(120):
            if chart.update(next(samples), 2 * MS):
                chart.accept(2 * MS)
        row = []
        for i in range(1, count + 1):
            if chart.update(next(samples) + extra, 2 * MS):
                chart.accept(2 * MS)
            row += [i] * chart.alarm
        found.append(row)
    return found


def test_healthy_link_is_hardly_ever_alarmed():
    """0.04 to 0.08 of 1000 iterations, benchmarks/detector.py."""
    print(f"seed {SEED}")
    rows = alarmed(random.Random(SEED), 20, 0.0, 1000)
    assert sum(map(len, rows)) <= 0.25 * 20


@pytest.mark.parametrize(("extra", "mean"), [(0.5, 4), (1, 2), (5, 1), (20, 1)])
def test_slower_link_is_alarmed_before_it_is_confirmed(extra, mean):
    print(f"seed {SEED}")
    rows = alarmed(random.Random(SEED), 30, extra * MS, 30)
    assert sum(row[0] for row in rows) / 30 <= mean


@pytest.mark.parametrize(("before", "after"), [(0, 40), (0.1, 5), (2, 8), (40, 0), (40, 20)])
def test_step_is_confirmed_by_its_second_or_third_sample(before, after):
    chart = steady(before * MS)
    assert confirmed(chart, [after * MS] * 10) in ([2], [3])
    assert chart.level == chart.estimate == after * MS


@pytest.mark.parametrize("count", [BASELINE, BASELINE + 1, 20])
def test_first_two_samples_of_a_large_step_confirm_it(count):
    """On a link that is steady, however few samples it has had: 38 ms of a stage's 90."""
    chart = steady(2 * MS, count, 90 * MS)
    assert confirmed(chart, [40 * MS] * 10, 90 * MS) == [2]
    assert confirmed(chart, [2 * MS] * 10, 90 * MS) == [2]


@pytest.mark.parametrize("factor", [2, 4, 20])
def test_step_in_noise_is_confirmed_soon_and_back(factor):
    print(f"seed {SEED}")
    rng, base, stage = random.Random(SEED), 2 * MS, 2 * MS
    for _ in range(10):
        chart = DelayChart()
        assert confirmed(chart, noise(rng, base, 30), stage) == [3]
        there = confirmed(chart, noise(rng, base * factor, 20), stage)
        back = confirmed(chart, noise(rng, base, 20), stage)
        assert there[0] <= 4
        assert back[0] <= 4
        assert chart.estimate == pytest.approx(base, rel=0.5)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.7])
@pytest.mark.parametrize(("before", "after"), [(0.05, 250), (250, 0.05), (40, 20)])
def test_a_step_within_an_iteration_is_planned_for_as_what_comes_after_it(before, after, share):
    """The first sample is a mixture, which may be a tenth of an iteration or more off."""
    chart = steady(before * MS)
    mixed = share * before + (1 - share) * after
    found = confirmed(chart, [mixed * MS] + [after * MS] * 20)
    # One that is mostly of the old level may disagree with the rest until it is out of sight.
    assert found in (([2],) if share < 0.5 else ([3], [4]))
    assert chart.level == chart.estimate == after * MS


@pytest.mark.parametrize("after", [0, 1, 5])
def test_single_peak_is_not_confirmed(after):
    """Not even right after a change was accepted, and the estimate does not follow it."""
    chart = steady(1 * MS)
    assert confirmed(chart, [21 * MS] * 2) == [2]
    assert confirmed(chart, [21 * MS] * after + [500 * MS]) == []
    assert chart.estimate == pytest.approx(21 * MS)
    assert confirmed(chart, [21 * MS] * 10) == []


def test_two_peaks_that_disagree_are_not_confirmed():
    chart = steady(1 * MS)
    assert confirmed(chart, [20 * MS, 200 * MS, 1 * MS, 1 * MS, 1 * MS]) == []
    assert confirmed(chart, [200 * MS, 1 * MS, 20 * MS, 1 * MS, 1 * MS]) == []


@pytest.mark.parametrize("healthy", [0, 1, 3, 7])
def test_a_step_among_the_first_samples_is_confirmed_once_and_by_three(healthy):
    """Whether the first level was learned before the step, after it, or across it."""
    samples = [0.3 * MS] * healthy + [40 * MS] * 30
    found = confirmed(DelayChart(), samples)
    assert len(found) == 1
    assert found[0] - healthy <= 3


def test_slow_from_the_start_is_confirmed_when_three_agree():
    chart = DelayChart()
    samples = [40 * MS, 41 * MS, 39 * MS, 40 * MS]
    assert [chart.update(s, STAGE) for s in samples] == [False, False, True, True]
    assert chart.level == 0.0  # nothing was planned for
    assert chart.estimate == pytest.approx(39.5 * MS)  # the oldest of three counts for nothing
    assert chart.update(40 * MS, STAGE)  # until it is accepted
    chart.accept(STAGE)
    assert chart.level == pytest.approx(40 * MS)
    assert confirmed(chart, [40 * MS] * 50) == []


def test_immaterial_change_is_not_confirmed():
    """A tenth of the level, or a fifth of a stage's time, is not worth a plan."""
    assert confirmed(steady(1 * MS), [2.9 * MS] * 30) == []
    assert confirmed(steady(100 * MS), [109 * MS] * 30) == []


def test_accept_keeps_what_has_not_changed():
    """A plan for another link's change does not shorten this link's baseline."""
    chart = steady(5 * MS, 30)
    chart.update(5.1 * MS, STAGE)
    chart.accept(STAGE)
    assert chart.level == pytest.approx(5 * MS)


@given(
    st.lists(st.floats(0, 10), max_size=40),
    st.floats(0, 1),
    st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_any_delays_keep_the_chart_sane(samples, stage, accepts):
    chart = DelayChart()
    for sample, accept in zip(samples, accepts, strict=False):
        chart.update(sample, stage)
        if accept:
            chart.accept(stage)
        assert 0 <= chart.estimate <= max(samples)
        assert chart.level is None or 0 <= chart.level <= max(samples)


def test_what_is_below_the_floor_means_nothing():
    for step, found in ((2 * MS, []), (6 * MS, [2])):
        chart = DelayChart(floor=3 * MS)
        assert confirmed(chart, [0.3 * MS] * 10) == []
        assert confirmed(chart, [step] * 10) == found
    assert confirmed(DelayChart(floor=3 * MS), [2 * MS] * 30) == []


@pytest.mark.parametrize("way", [1, -1])
def test_enough_in_a_row_to_one_side_are_a_change_however_they_differ(way):
    """50 ms before, then by turns 30 and 8 more, or less."""
    far, near = (50 + way * 30) * MS, (50 + way * 8) * MS
    assert confirmed(steady(50 * MS), [far, near] * 10) == []
    chart = steady(50 * MS, lasting=6)
    assert confirmed(chart, [far, near] * 2) == []
    other = (50 - way * 8) * MS
    assert confirmed(steady(50 * MS, lasting=6), [far, near, far, near, other] * 4) == []
    assert [chart.update(one, STAGE) for one in (far, near, far)] == [False, True, True]
    assert chart.estimate == pytest.approx((near + far) / 2)
    chart.accept(STAGE)
    assert not chart.lasts
    assert confirmed(chart, [50 * MS] * 10) in ([2], [3])
