"""From records to Conditions: costs, delays, corrections."""

import json
import math
from dataclasses import replace

import pytest
from measure.records import record, report

from megatron_adaptra.config import Budget
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.measure.estimate import Estimator
from megatron_adaptra.measure.report import Memory, StageReport, Step

MS = 1e-3
HOST = ["one"] * 3


def estimator(hosts=HOST, cores=None, **more) -> Estimator:
    return Estimator(4, hosts, cores, message_bytes=1000, **more)


def reports(iteration, delays, **more):
    """Of three stages, as the leader sees them: its own, and the others' through JSON."""
    out = []
    for stage in range(3):
        sources = {s: delays.get((s, stage), 0.0) for s in (stage - 1, stage + 1) if 0 <= s < 3}
        one = replace(record(stage, iteration, sources, **more).report(), step=Step(0.005))
        out.append(StageReport.from_json(json.loads(json.dumps(one.to_json()))) if stage else one)
    return out


def feed(estimator, count, delays, **more):
    return [estimator.update(reports(i, delays, **more)) for i in range(count)]


def test_conditions_hold_what_was_measured():
    e = estimator(budget=Budget(7.0))
    feed(e, 6, {(0, 1): 30 * MS, (1, 0): 5 * MS})
    c = e.conditions()
    assert c.forward == pytest.approx((10 * MS,) * 3)
    assert c.backward_input == c.backward_weight == pytest.approx((10 * MS,) * 3)
    assert (c.microbatches, c.message_bytes, c.cores) == (4, 1000.0, None)
    assert c.activation_budget == (7.0,) * 3
    assert c.step_seconds == pytest.approx(5 * MS)
    assert c.link(0, 1).delay == pytest.approx(30 * MS)
    assert c.link(1, 0).delay == pytest.approx(5 * MS)
    assert c.link(1, 2).delay == c.link(2, 1).delay == 0.0
    assert Conditions.from_json(json.loads(json.dumps(c.to_json()))) == c
    assert e.delays() == {"0>1": c.link(0, 1).delay, "1>0": c.link(1, 0).delay} | {
        "1>2": 0.0, "2>1": 0.0
    }  # fmt: skip


def test_shared_cores_count_cpu_seconds_and_the_rest_of_the_process():
    """Ops took half their wall time of CPU, and the process a quarter more than its ops."""
    e = estimator(cores=2.0)
    feed(e, 5, {}, busy=1.25)
    c = e.conditions()
    assert c.cores == 2.0
    assert c.forward == pytest.approx((10 * MS / 2 * 1.25,) * 3)
    assert c.backward_input == pytest.approx((10 * MS / 2 * 1.25,) * 3)


def test_where_cores_are_shared_a_wait_for_one_is_not_a_slow_link():
    """Half the messages waited 9 ms for a core; on a slow link every one would have waited."""
    alone, shared = estimator(), estimator(cores=2.0)
    for i in range(6):
        mixed = [record(s, i, {s - 1: 0.1 * MS} if s else {}) for s in range(3)]
        for r in mixed[1:]:
            r.messages += record(r.worker, i, {r.worker - 1: 9 * MS}).messages[:7]
            r.messages = r.messages[-14:]
        got = [r.report() for r in mixed]
        alone.update(got)
        shared.update(got)
    assert alone.conditions().link(0, 1).delay > 4 * MS
    assert shared.conditions().link(0, 1).delay == pytest.approx(0.1 * MS)


def test_stage_seconds_with_and_without_shared_cores():
    alone, shared = estimator(), estimator(cores=0.5)
    assert alone.stage_seconds() == 0.0
    feed(alone, 3, {})
    feed(shared, 3, {})
    assert alone.stage_seconds() == pytest.approx(30 * MS)
    assert shared.stage_seconds() == pytest.approx(3 * 15 * MS / 0.5)


def test_op_seconds_are_recent_medians():
    e = estimator()
    feed(e, 9, {}, forward=50 * MS)
    feed(e, 2, {}, forward=10 * MS)
    assert e.conditions().forward == pytest.approx((50 * MS,) * 3)
    feed(e, 1, {}, forward=10 * MS)
    assert e.conditions().forward == pytest.approx((10 * MS,) * 3)


def test_changed_links_are_named_by_direction():
    e = estimator()
    assert feed(e, 6, {}) == [[]] * 6
    changes = feed(e, 4, {(1, 2): 40 * MS})
    assert changes == [[], [(1, 2)], [(1, 2)], [(1, 2)]]
    e.accept()
    assert feed(e, 3, {(1, 2): 40 * MS}) == [[]] * 3
    assert feed(e, 2, {}) == [[], [(1, 2)]]


def test_accept_before_the_first_levels_is_harmless():
    e = estimator()
    e.accept()
    assert feed(e, 2, {}) == [[], []]
    e.accept()
    assert feed(e, 4, {}) == [[]] * 4


@pytest.mark.parametrize("offset", [0.0, 1000.0, -1000.0, 0.012])
def test_two_hosts_share_the_round_trip(offset):
    """Their clocks differ by anything; there and back the difference cancels."""
    e = estimator(["one", "one", "two"])
    delays = {(0, 1): 1 * MS, (1, 0): 2 * MS, (1, 2): 30 * MS, (2, 1): 10 * MS}
    feed(e, 6, delays, clock={2: offset})
    c = e.conditions()
    assert c.link(0, 1).delay == pytest.approx(1 * MS)
    assert c.link(1, 0).delay == pytest.approx(2 * MS)
    assert c.link(1, 2).delay == pytest.approx(20 * MS, rel=1e-6)
    assert c.link(2, 1).delay == pytest.approx(20 * MS, rel=1e-6)


def test_step_between_two_hosts_is_noticed():
    e = estimator(["one", "one", "two"])
    clock = {2: -5000.0}
    assert feed(e, 6, {}, clock=clock) == [[]] * 6
    assert feed(e, 2, {(1, 2): 60 * MS}, clock=clock) == [[], [(1, 2), (2, 1)]]


def test_one_way_between_two_hosts_measures_nothing():
    e = estimator(["one", "two", "two"])
    for i in range(6):
        some = reports(i, {(1, 0): 40 * MS}, clock={0: 77.0})
        links = {a: replace(link, transit=None) for a, link in some[1].links.items()}
        some[1] = replace(some[1], links=links)
        assert e.update(some) == []
    assert e.conditions().link(1, 0).delay == 0.0


def test_delay_is_never_negative():
    e = estimator()
    feed(e, 6, {(0, 1): -1 * MS})
    assert e.conditions().link(0, 1).delay == 0.0


@pytest.mark.parametrize(
    ("ratios", "correction"),
    [
        ([], 1.0),
        ([1.1], 1.1),
        ([1.0, 1.1, 1.2], 1.1),
        ([5.0] * 9, 1.25),
        ([0.1] * 9, 0.9),
        ([9.0] * 9 + [1.05] * 3, 1.05),
    ],
)
def test_correction_is_a_recent_median_within_bounds(ratios, correction):
    e = estimator()
    feed(e, 3, {})
    plain = e.conditions(corrected=False)
    for ratio in ratios:
        e.learn(0.5, 0.5 * ratio)
    e.learn(0.0, 1.0)  # nothing predicted, nothing learned
    assert e.correction.factor == pytest.approx(correction)
    assert e.conditions(corrected=False) == plain
    corrected = e.conditions()
    assert corrected.forward == pytest.approx([correction * f for f in plain.forward])
    assert corrected.backward_weight == pytest.approx(
        [correction * f for f in plain.backward_weight]
    )
    assert corrected.links == plain.links


def test_halves_of_backwards_are_taken_as_they_were_measured():
    """And keep their share of the whole in iterations that do not run them apart."""
    e = estimator(split=True)
    for i in range(12):
        rows = reports(i, {})
        for row in rows if i < 6 else ():
            for seconds in (row.wall, row.cpu):
                whole = seconds.pop("B")
                seconds |= {"I": 0.75 * whole, "W": 0.5 * whole}
        e.update(rows)
        c = e.conditions()
        factor = 1.25 if i < 8 else 1.0  # of five iterations the median counts
        assert c.backward_input == pytest.approx([factor * 12 * MS] * 3)
        assert c.backward_weight == pytest.approx([factor * 8 * MS] * 3)
    assert c.split


def test_what_ran_once_is_known_when_it_runs_no_more():
    """A trial runs every kind of op; afterwards all costs follow those of what still runs."""
    e = estimator(split=True, recompute=True)
    for i in range(20):
        rows = reports(i, {})
        for row in rows:
            for seconds in (row.wall, row.cpu):
                if i < 5:
                    seconds |= {"I": 0.7 * seconds["B"], "W": 0.5 * seconds["B"]}
                    seconds["R"] = 1.25 * seconds["F"]
                elif i >= 12:  # only halves, and everything twice as fast
                    seconds |= {"I": 0.35 * seconds["B"], "W": 0.25 * seconds.pop("B")}
                    seconds["F"] /= 2
        e.update(rows)
        c = e.conditions()
        pace = 0.5 if i >= 14 else 1.0
        assert c.forward == pytest.approx([pace * 10 * MS] * 3)
        assert c.backward == pytest.approx([pace * 20 * MS] * 3)
        assert c.backward_input == pytest.approx([pace * 14 * MS] * 3)
        assert c.backward_weight == pytest.approx([pace * 10 * MS] * 3)
        assert c.recomputation == pytest.approx([pace * 12.5 * MS] * 3)


def test_seconds_of_a_stage_are_those_of_all_its_chunks():
    e = estimator(chunks=2)
    feed(e, 6, {(2, 0): 30 * MS, (0, 2): 20 * MS})
    c = e.conditions()
    assert c.chunks == 2
    assert c.forward == pytest.approx([20 * MS] * 3)
    assert {"2>0", "0>2"} <= e.delays().keys()


@pytest.mark.parametrize(
    ("budget", "microbatches"), [(Budget(nbytes=1000), 3.0), (Budget(auto=True), 9.0)]
)
def test_a_budget_in_bytes_is_known_once_all_stages_have_measured(budget, microbatches):
    e = estimator(budget=budget)
    memory = Memory(3.0, peak_bytes=900, per_microbatch=300, free=2000)
    rows = [report(0, memory=memory), report(1, memory=memory), report(2)]
    assert not e.measure_budget(rows)
    assert e.budgets == (math.inf,) * 3
    rows[2] = report(2, memory=replace(memory, per_microbatch=1000))
    assert e.measure_budget(rows)
    assert e.budgets == (microbatches, microbatches, 1.0 if budget.nbytes == 1000 else 2.0)
    rows = [report(s, memory=replace(memory, peak_bytes=900, free=99000)) for s in range(3)]
    assert not e.measure_budget(rows), "what is given back must not make room for more"


def test_a_budget_below_one_microbatch_is_given_up_with_the_least_that_works():
    e = estimator(budget=Budget(nbytes=1000), at_first=(3.0, 2.0, 1.0))
    memory = Memory(3.0, peak_bytes=900, per_microbatch=300, free=2000)
    rows = [report(0, memory=memory), report(1, memory=memory)]
    rows.append(report(2, memory=replace(memory, per_microbatch=3 << 20)))
    assert not e.measure_budget(rows)
    assert e.budgets == (3.0, 2.0, 1.0), "as it has begun"
    assert "budget of 1kB cannot be kept" in e.unmet
    assert "stage 2 takes 3.146MB, which is the least that works" in e.unmet
    assert not e.measure_budget(rows)
    least = estimator(budget=Budget(nbytes=3 << 20), at_first=(3.0, 2.0, 1.0))
    least.measure_budget(rows)
    assert not least.unmet
    assert least.budgets[2] == 1.0


def test_a_plan_that_takes_more_bytes_than_it_may_gets_a_smaller_budget():
    e = estimator(budget=Budget(nbytes=1000))
    memory = Memory(3.0, peak_bytes=900, per_microbatch=250, free=0)
    assert e.measure_budget([report(s, memory=memory) for s in range(3)])
    assert e.budgets == (4.0, 4.0, 4.0)
    rows = [report(s, memory=replace(memory, peak=4.0, peak_bytes=1000)) for s in range(3)]
    assert not e.measure_budget(rows)
    rows[2] = report(2, memory=replace(memory, peak=4.0, peak_bytes=1250))
    assert e.measure_budget(rows)
    assert e.budgets == (4.0, 4.0, pytest.approx(3.2))
    assert not e.measure_budget(rows), "the same plan says nothing new"
    rows[2] = report(2, memory=replace(memory, peak=3.2, peak_bytes=9999))
    assert e.measure_budget(rows)
    assert e.budgets == (4.0, 4.0, 1.0)


def test_backwards_in_halves_that_take_more_than_one_microbatch_may_are_given_up():
    e = estimator(budget=Budget(nbytes=1000), split=True)
    memory = Memory(1.0, peak_bytes=900, per_microbatch=900, free=0)
    assert e.measure_budget([report(s, memory=memory) for s in range(3)])
    assert e.split
    rows = [report(s, memory=replace(memory, peak_bytes=1200)) for s in range(3)]
    assert e.measure_budget(rows)
    assert not e.split
    assert e.budgets == (1.0, 1.0, 1.0)
    assert not e.measure_budget(rows)


@pytest.mark.parametrize(
    # Of 10,000 bytes 400 are taken in passing and 400 by four messages: 9200 / (1000 + 3 * 100).
    # Of 3400 + 0.9 * 8000 again 400 in passing: 10,200 / (1000 + 100).
    ("budget", "fit"), [(Budget(nbytes=10_000), 7.0), (Budget(auto=True), 9.0)],
)  # fmt: skip
def test_on_a_gpu_a_budget_is_for_passing_memory_and_messages_too(budget, fit):
    e = Estimator(4, ["a", "b"], None, 100, budget, on_device=True)
    memory = Memory(3.0, peak_bytes=3400, per_microbatch=1000, free=8000)
    assert e.measure_budget([report(s, memory=memory) for s in range(2)])
    assert e.budgets == (fit, fit)
    # All that was pinned counts against a budget of bytes, but not against what a GPU has free.
    rows = [report(s, memory=replace(memory, pinned=9999)) for s in range(2)]
    assert e.measure_budget(rows) is not budget.auto
