"""Links as seen through Megatron's own messages: when ops began and ended, and nothing else."""

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measure.records import job, stock, stock_records

from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.measure.estimate import Estimator
from megatron_adaptra.measure.probe import Probe
from megatron_adaptra.measure.report import StageReport
from megatron_adaptra.measure.stock_messages import FIRST_PATIENCE, RECENT, Excess, stock_links

MS = 1e-3


def reports(timeline, *args, **kwargs) -> list[StageReport]:
    """What all stages say of an iteration, see stock_records."""
    records = stock_records(timeline, *args, **kwargs)
    return [record.report() for record in records]


@given(st.integers(2, 6), st.integers(1, 2), st.data())
def test_a_link_that_holds_ops_up_is_measured(stages, chunks, data):
    """To the microsecond, if it is the only slow one, and slow enough for ops to wait for it."""
    link = data.draw(st.sampled_from([(s, s + 1) for s in range(stages - 1)]))
    source, target = data.draw(st.sampled_from([link, link[::-1]]))
    delay = data.draw(st.floats(200 * MS, 900 * MS))
    timeline = stock(job({(source, target): delay}, stages, chunks))
    seen = stock_links(reports(timeline), chunks)[source, target]
    assert seen.seconds == pytest.approx(delay, abs=1e-6)
    assert seen.transit == pytest.approx(delay, abs=1e-6)


@given(st.integers(2, 6), st.data())
def test_no_link_is_taken_for_slower_than_it_is(stages, data):
    links = [link for s in range(stages - 1) for link in ((s, s + 1), (s + 1, s))]
    slow = {link: data.draw(st.floats(0, 100 * MS)) for link in links}
    found = stock_links(reports(stock(job(slow, stages))), 1)
    assert found.keys() == slow.keys()
    for link, seen in found.items():
        assert -1e-9 <= seen.seconds <= slow[link] + 1e-9


def test_a_host_that_launches_late_is_no_slow_link():
    timeline = stock(job({}, 2))
    spans = [s._replace(start=s.start + 5 * i, end=s.end + 5 * i) for i, s in
             enumerate(sorted(timeline.spans, key=lambda s: s.start))]  # fmt: skip
    slowly = Timeline(tuple(spans))
    seen = stock_links(reports(slowly), 1)
    assert max(one.seconds for one in seen.values()) > 1.0
    seen = stock_links(reports(slowly, late={0: 100.0, 1: 100.0}), 1)
    assert max(one.seconds for one in seen.values()) == 0.0


def test_where_cores_are_short_a_few_messages_in_time_show_a_healthy_link():
    first, second = reports(stock(job(dict.fromkeys([(0, 1), (1, 0)], 300 * MS), 2)))
    late = [op._replace(start=op.start + 5 * (n % 6 > 0)) for n, op in enumerate(second.ops)]
    two = [first, replace(second, ops=tuple(late))]
    assert stock_links(two, 1)[0, 1].seconds > 1.0
    assert stock_links(two, 1, crowded=True)[0, 1].seconds == pytest.approx(300 * MS)


def test_of_several_calls_before_an_op_the_last_one_brought_its_message():
    """In the end of an iteration a gradient is sent first, perhaps over a slow link."""
    probe = Probe(1)
    probe.begin(0, stock=True)
    for calls in (1, 2):
        for _ in range(calls):
            called = time.monotonic()
            probe.asks()
            probe.answered()
        probe.op_begins()
        probe.op_ends(Op(Kind.B, calls))
        assert probe.pipeline_ends().ops[-1].asked >= called


def test_an_op_that_nobody_has_run_is_an_error():
    two = reports(stock(job({}, 2)))
    two[0] = replace(two[0], ops=two[0].ops[1:])
    with pytest.raises(KeyError):
        stock_links(two, 1)
    assert Op.parse(two[0].ops[0].op)


LINKS = [(0, 1), (1, 0), (1, 2), (2, 1)]


def feed(
    estimator: Estimator, theirs: dict[tuple[int, int], float], ours: float, count: int
) -> None:
    """`count` iterations over Megatron's messages, and probes that take `ours` seconds."""
    timeline = stock(job(theirs, 3))
    for i in range(count):
        estimator.update(reports(timeline, i, probed=dict.fromkeys(LINKS, ours)))
        if any(chart.estimate != chart.level for chart in estimator.charts.values()):
            estimator.accept()


@pytest.mark.parametrize("hosts", ["aaa", "abc"])
def test_a_link_may_be_slow_for_their_messages_and_not_for_ours(hosts):
    estimator = Estimator(6, list(hosts), None, 1)
    feed(estimator, {(1, 2): 300 * MS, (2, 1): 300 * MS}, 1 * MS, 8)
    ours, theirs = estimator.conditions(), estimator.conditions(native=True)
    assert theirs.link(1, 2).delay == pytest.approx(300 * MS, rel=0.01)
    assert ours.link(1, 2).delay == pytest.approx(1 * MS, rel=0.01)


@pytest.mark.parametrize("hosts", ["aaa", "abc"])
def test_a_link_may_be_slow_for_ours_and_not_for_theirs(hosts):
    """Then Megatron keeps its messages."""
    estimator = Estimator(6, list(hosts), None, 1)
    feed(estimator, {}, 300 * MS, 8)
    ours, theirs = estimator.conditions(), estimator.conditions(native=True)
    assert ours.link(1, 2).delay == pytest.approx(300 * MS, rel=0.01)
    assert theirs.link(1, 2).delay < 10 * MS


def believed(excess: Excess) -> int:
    """For how many iterations."""
    count = 0
    while excess.believed(0.001):
        count += 1
    return count


def test_what_was_measured_once_is_believed_for_a_while_and_longer_if_it_stays_so():
    excess, waited = Excess(), []
    for _ in range(4):  # tried again each time, and as slow as ever
        assert excess.measure(0.301, 0.001, matters=0.01) == pytest.approx(0.3)
        waited.append(believed(excess))
    assert waited == [FIRST_PATIENCE, 2 * FIRST_PATIENCE, 4 * FIRST_PATIENCE, 8 * FIRST_PATIENCE]
    excess.measure(0.001, 0.001, matters=0.01)  # of three, one is no news
    assert believed(excess)
    for _ in range(2):
        assert abs(excess.measure(0.001, 0.001, matters=0.01)) in (0.0, 0.3)
    assert not believed(excess)


def test_an_excess_shrinks_as_the_link_heals() -> None:
    """Messages that wait for a credit take three delays of a slow link, and of a healed one."""
    excess, slow, well = Excess(), 0.040, 0.0015
    for _ in range(RECENT):
        excess.measure(3 * slow, slow, matters=0.002)
    assert excess.believed(slow) == pytest.approx(2 * slow)
    assert excess.believed(2 * slow) == pytest.approx(2 * slow)
    assert excess.believed(well) == pytest.approx(2 * well)
    assert excess.believed(well / 2) == 0.0, "too little to matter"
    for _ in range(RECENT):  # of one kind alone, while ours are well
        excess.measure(slow, well, matters=0.002)
    assert excess.believed(well) == pytest.approx(slow - well)


def test_a_difference_of_degree_is_not_believed_once_it_cannot_be_seen():
    """A link that is slow for both is a little slower for one of them."""
    excess = Excess()
    assert excess.measure(0.045, 0.040, matters=0.002) == pytest.approx(0.005)
    assert not believed(excess)
