"""What a stage saw: reports and measured timelines."""

import gc
import json
import threading
import time

import pytest
from measure.records import record
from patience import PATIENCE

from megatron_adaptra.device.base import HostDevice, HostMark
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.timeline import Message, Span, Timeline
from megatron_adaptra.measure.iteration_record import (
    CollectiveSpan,
    IterationRecord,
    OpTime,
    merge,
)
from megatron_adaptra.measure.link_delay import link_sample
from megatron_adaptra.measure.probe import Probe
from megatron_adaptra.measure.report import StageReport
from megatron_adaptra.transport.base import Stamps

MS = 1e-3
F, B = Kind.F, Kind.B


def test_report_holds_means_medians_and_survives_json():
    got = record(1, 7, {0: 3 * MS, 2: 0.0}, busy=1.5).report()
    assert (got.worker, got.iteration) == (1, 7)
    assert got.wall == pytest.approx({"F": 10 * MS, "B": 20 * MS})
    assert got.cpu == pytest.approx({"F": 5 * MS, "B": 10 * MS})
    assert got.overhead == pytest.approx(1.5)
    for source, seconds in {0: 3 * MS, 2: 0.0}.items():
        assert got.links[source].delay == pytest.approx(seconds)
        assert got.links[source].transit == pytest.approx(seconds)
    assert StageReport.from_json(json.loads(json.dumps(got.to_json()))) == got


def test_delay_is_a_median():
    """One late wake-up is not a slow link."""
    got = link_sample([Stamps(10.0, 9.0, 10.0 + delay) for delay in (1.0, 1.1, 90.0)])
    assert (got.delay, got.delay_p25) == (pytest.approx(1.1), pytest.approx(1.0))


def test_what_was_sent_before_its_receive_was_posted_says_nothing_of_the_link():
    """After equally deep warmups most messages have long arrived when their receive is posted."""
    early = [Stamps(sent=10.0 + i, posted=30.0, completed=30.1) for i in range(1, 12)]
    got = link_sample([Stamps(sent=10.0, posted=9.0, completed=14.0), *early])
    assert got.delay == got.transit == pytest.approx(4.0)
    assert got.ahead == pytest.approx(1.0)
    assert link_sample(early).delay == pytest.approx(0.1), "nothing better is known"


def test_wall_is_a_median_and_cpu_a_mean():
    r = IterationRecord(0, 0)
    for i, (wall, cpu) in enumerate([(1, 1), (1, 1), (9, 4)]):
        r.ops.append(OpTime(Op(F, i), 0.0, wall, cpu))
    assert r.report().wall == {"F": 1}
    assert r.report().cpu == {"F": 2}


def test_what_ops_neither_computed_nor_queued_for_is_idle():
    r = IterationRecord(0, 0)
    for i, (wall, cpu, queued) in enumerate([(1, 1, 0), (9, 2, 4), (2, 1.5, 0.75)]):
        r.ops.append(OpTime(Op(F, i), 0.0, wall, cpu, queued=queued))
    got = r.report()
    assert got.queued == {"F": pytest.approx(4.75 / 3)}
    assert got.idle == {"F": pytest.approx((12 - 4.5 - 4.75) / 3)}
    r.ops[1] = r.ops[1]._replace(queued=None)  # as on a device, or where the kernel does not count
    assert r.report().queued == r.report().idle == {}


def test_an_op_that_sleeps_is_idle_for_as_long():
    probe = Probe(0)
    probe.begin(0)
    probe.op_begins()
    time.sleep(0.05)
    probe.op_ends(Op(F, 0))
    (op,) = probe.pipeline_ends().ops
    if op.queued is not None:
        idle = op.end - op.start - op.cpu - op.queued
        assert 0.045 <= idle <= op.end - op.start


def test_what_an_op_has_waited_for_other_replicas_is_not_what_it_takes():
    probe = Probe(0)
    probe.begin(0)
    for i, waited in enumerate([10.0, 0.0, 0.0]):  # seconds
        probe.op_begins()
        if waited:
            probe.waited(waited / 2)
            probe.waited(waited / 2)
        probe.op_ends(Op(F, i))
    r = probe.pipeline_ends()
    assert [o.waited for o in r.ops] == [10.0, 0.0, 0.0]
    r.ops = [OpTime(Op(F, i), 0.0, 12.0, 1.0, queued=0.5, waited=10.0) for i in range(3)]
    assert r.report().wall == {"F": 2.0}
    assert r.report().idle == {"F": pytest.approx(0.5)}
    r.ops = [r.ops[0]._replace(waited=12.0)]  # what it has computed itself counts
    assert r.report().wall == {"F": 1.0}


def test_what_dropping_activations_costs_counts_as_recompute():
    """F is a forward like others; R is all that a recomputed microbatch takes more."""
    r = IterationRecord(0, 0)
    for i, forward in enumerate([10, 10, 13]):
        r.ops.append(OpTime(Op(F, i), 0.0, forward, forward))
    r.ops.append(OpTime(Op(Kind.R, 2), 0.0, 11, 11))
    assert r.report().wall == r.report().cpu == {"F": 10, "R": 14}
    r.ops = r.ops[2:]  # all are recomputed: this is what a forward takes here
    assert r.report().wall == {"F": 13, "R": 11}


@pytest.mark.parametrize(
    ("start", "asked", "lag", "starved"),
    [
        (10.0, 8.0, 0.0, 0.0),  # no gap
        (14.0, 9.0, 0.0, 0.0),  # a message was awaited, of which the host had asked in time
        (14.0, 11.0, 0.0, 1.0),  # the host asked late
        (14.0, 9.0, 2.0, 2.0),  # and launched late
        (14.0, 13.0, 2.0, 4.0),  # never more than the gap
        (9.5, 11.0, 2.0, 0.0),
    ],
)
def test_what_a_host_is_late_is_reported_by_itself(start, asked, lag, starved):
    r = IterationRecord(1, 0, stock=True)
    r.ops = [OpTime(Op(F, 0), 1.0, 10.0, 0.0), OpTime(Op(F, 1), start, 20.0, 0.0, asked, lag)]
    assert r.starved == pytest.approx(starved)
    assert r.report().starved == pytest.approx(starved)


def test_empty_record_reports():
    got = IterationRecord(0, 0).report()
    assert got.overhead == 1.0
    assert got.links == {}
    assert IterationRecord(0, 0, begin=3.0).last_op_end == 3.0


def test_probe_keeps_what_happened_in_order():
    probe = Probe(2)
    probe.begin(5)
    for i in range(3):
        probe.op_begins()
        time.sleep(0.002)
        probe.op_ends(Op(F, i))
    probe.arrived(1, Op(F, 0), Stamps(1.0, 1.0, 2.0))
    probe.pipeline_ends()
    probe.iteration_ends()
    r = probe.record
    assert (r.worker, r.iteration) == (2, 5)
    assert [o.op for o in r.ops] == [Op(F, i) for i in range(3)]
    times = [r.begin, *(t for o in r.ops for t in (o.start, o.end)), r.end]
    assert times == sorted(times)
    assert all(o.end - o.start >= 0.002 for o in r.ops)
    assert r.messages == [(1, Op(F, 0), Stamps(1.0, 1.0, 2.0))]
    probe.begin(6)
    assert probe.record is not r
    assert probe.record.ops == []


def test_cpu_of_an_op_is_its_threads_and_of_a_record_the_process():
    """Work of other threads is in the record, not in the op."""

    def burn(seconds):
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    probe = Probe(0)
    probe.begin(0)
    probe.op_begins()
    other = threading.Thread(target=burn, args=(0.05,))
    other.start()
    burn(0.01)
    other.join()
    probe.op_ends(Op(F, 0))
    probe.pipeline_ends()
    op = probe.record.ops[0]
    assert 0.01 <= op.cpu <= probe.record.cpu - 0.05 + 0.01
    assert probe.record.report().overhead >= 2.0


def test_merge_makes_the_measured_timeline():
    first, second = IterationRecord(0, 3, begin=50.0), IterationRecord(1, 3, begin=50.5)
    first.ops = [OpTime(Op(F, 0), 50.0, 51.0, 1.0), OpTime(Op(B, 0), 55.0, 57.0, 2.0)]
    second.ops = [OpTime(Op(F, 0), 52.0, 53.0, 1.0), OpTime(Op(B, 0), 53.0, 54.0, 2.0)]
    first.messages = [(1, Op(B, 0), Stamps(54.0, 49.0, 55.0, 51.0))]  # posted the iteration before
    second.messages = [(0, Op(F, 0), Stamps(51.0, 50.5, 52.0, 50.5))]
    first.end, second.end = 60.0, 58.5
    step = Op(Kind.STEP, 0)
    assert merge([first, second], "measured") == Timeline(
        (
            Span(0, Op(F, 0), 0.0, 1.0),
            Span(0, Op(B, 0), 5.0, 7.0),
            Span(0, step, 7.0, 10.0),
            Span(1, Op(F, 0), 2.0, 3.0),
            Span(1, Op(B, 0), 3.0, 4.0),
            Span(1, step, 7.0, 8.5),  # the step begins when the whole pipeline has finished
        ),
        (Message(1, 0, Op(B, 0), 4.0, 5.0, 0.0), Message(0, 1, Op(F, 0), 1.0, 2.0, 0.5)),
        "measured",
    )


def test_merge_without_ends_has_no_step():
    r = record(0, 0, {})
    r.end = 0.0
    timeline = merge([r], "open")
    assert all(span.op.kind is not Kind.STEP for span in timeline.spans)
    assert timeline.busy(0) == pytest.approx(4 * 30 * MS)


def test_a_step_is_drawn_with_its_collectives():
    r = record(0, 0, {}, count=1, begin=0.0, step=0.0)
    end = r.last_op_end
    r.end = end + 10 * MS
    r.collectives = [
        CollectiveSpan("all_reduce", end + 1 * MS, end + 4 * MS, 9 * MS, 3 * MS),
        CollectiveSpan("all_reduce", end + 4 * MS, end + 6 * MS, 9 * MS, 2 * MS),
    ]
    assert r.step.seconds == pytest.approx(10 * MS)
    assert [taken for _, taken, *_ in r.step.collectives] == pytest.approx([3 * MS, 2 * MS])
    line = [s for s in merge([r], "measured").spans if s.start >= end - 1e-9]
    assert [str(s.op) for s in line] == ["T0", "X0", "X1", "T2"]
    assert [s.end - s.start for s in line] == pytest.approx([1 * MS, 3 * MS, 2 * MS, 4 * MS])


class Lost:
    """A mark that cannot be read any more."""

    recorded, fault = 5.0, "it was read too late"

    def at(self):
        return None


class Losing:
    """A clock whose marks are all lost."""

    name, behind = "losing", True

    def mark(self):
        return Lost()

    def marker(self):
        return self.mark

    def anchor(self): ...


def test_marks_that_are_lost_hold_up_nothing():
    """Their records say so, and those that follow are read."""
    probe = Probe(0, Losing())
    records = []
    for iteration in range(40):
        probe.begin(iteration)
        probe.op_begins()
        probe.op_ends(Op(F, 0))
        records.append(probe.pipeline_ends())
        probe.iteration_ends()
        probe.read()
    assert all(r.known and r.end and r.unusable and not r.ops for r in records)


class ReadMeanwhile(HostMark):
    """While its moment is asked for, another thread calls `read`."""

    def __init__(self, read):
        super().__init__()
        self._read, self._asked = read, False

    def at(self):
        asked, self._asked = self._asked, True
        if not asked:
            thread = threading.Thread(target=self._read)
            thread.start()
            thread.join(PATIENCE)
            assert not thread.is_alive()
        return super().at()


class Meanwhile(HostDevice):
    """A host with such marks; `read` is what is called."""

    def read(self): ...

    def mark(self):
        return ReadMeanwhile(lambda: self.read())


def test_records_are_whole_where_another_thread_reads_at_the_same_moment():
    """As the one does that reports: on a busy machine it comes late, while the step ends."""
    clock = Meanwhile()
    probe = Probe(0, clock)
    clock.read = probe.read
    for iteration in range(3):
        probe.begin(iteration)
        probe.op_begins()
        probe.op_ends(Op(F, 0))
        record = probe.pipeline_ends()
        probe.iteration_ends()
        assert record.known
        assert record.end
        assert len(record.ops) == 1


def test_waits_for_batches_and_garbage_are_aside():
    probe = Probe(0)
    probe.begin(0)
    probe.op_begins()
    probe.loads()
    time.sleep(0.05)
    gc.collect()  # counts as garbage, not as waiting
    probe.loaded()
    gc.collect()
    probe.op_ends(Op(F, 0))
    first = probe.pipeline_ends()
    probe.iteration_ends()
    (op,) = first.ops
    assert 0.045 <= first.loading <= op.aside <= op.end - op.start
    probe.begin(1)
    probe.op_begins()
    probe.op_ends(Op(F, 0))
    report = probe.pipeline_ends().report(first)
    assert (report.loading, report.collecting) == (first.loading, first.collecting)
    assert 0 < first.collecting <= op.aside_cpu + 1e-6
    assert report.alone == {}, "this one has done neither"
    assert probe.record.loading is None
    alone = first.report().of_ops_alone()
    assert alone.wall["F"] == pytest.approx(op.end - op.start - op.aside)
    assert alone.cpu["F"] < op.cpu
    probe.close()
    assert not [one for one in gc.callbacks if "GarbageTime" in one.__qualname__]


def test_what_was_aside_is_taken_from_all_clocks():
    r = IterationRecord(0, 0)
    r.ops = [OpTime(Op(F, i), 0.0, 12.0, 5.0, queued=1.0, aside=8.0, aside_cpu=3.0) for i in (0, 1)]
    report = StageReport.from_json(json.loads(json.dumps(r.report().to_json()))).of_ops_alone()
    assert (report.wall, report.cpu, report.idle) == ({"F": 4.0}, {"F": 2.0}, {"F": 1.0})
