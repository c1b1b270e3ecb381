"""A thin port is distinguished from thin links, and trainings over it are predicted rightly."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.measure.estimate import Estimator
from megatron_adaptra.measure.iteration_record import IterationRecord, OpTime
from megatron_adaptra.measure.link_probe import NBYTES
from megatron_adaptra.measure.port_use import PortModel, PortUse, port_use
from megatron_adaptra.measure.report import StageReport
from megatron_adaptra.plan import make_plan
from megatron_adaptra.sim.clock import simulate
from megatron_adaptra.transport.base import Stamps

MS = 1e-3
STAGES, COUNT, SMALL = 4, 12, 0.3 * MS
MESSAGE, RATE = 400_000, 20e6  # 20 ms
LINKS = [(a, b) for a in range(STAGES) for b in (a - 1, a + 1) if 0 <= b < STAGES]


def job(thin: int | None, port: bool, rate: float = RATE) -> Conditions:
    """Stages of 9 and 16 ms; all links of stage `thin` pass `rate`, or its `port` does so."""
    links = {
        link: LinkState(SMALL, rate) if thin in link and not port else LinkState(SMALL)
        for link in LINKS
    }
    ports = {thin: rate} if port and thin is not None else {}
    return Conditions(
        COUNT, (9 * MS,) * STAGES, (10 * MS,) * STAGES, (6 * MS,) * STAGES, links,
        message_bytes=MESSAGE, ports=ports,
    )  # fmt: skip


def reports(
    true: Conditions, schedule: Schedule, iteration: int, rng: random.Random
) -> list[StageReport]:
    """What the stages measure of an iteration; messages are up to a millisecond late."""
    timeline = simulate(lower(schedule), true)
    records = [IterationRecord(s, iteration, 1.0, 1.0 + timeline.makespan) for s in range(STAGES)]
    for span in sorted(timeline.spans, key=lambda span: span.start):
        if span.op.kind.computes:
            record = records[span.stage]
            record.ops.append(OpTime(span.op, 1 + span.start, 1 + span.end, 0.0))
    for m in sorted(timeline.messages, key=lambda m: m.arrived):
        late = 1 + m.arrived + rng.uniform(0, 0.2 * MS)
        stamps = Stamps(1 + m.sent, 0.5, late, eager=True, nbytes=MESSAGE)
        records[m.target].messages.append((m.source, m.op, stamps))
    for source, target in LINKS:
        probe = Stamps(0.5, 0.1, 0.5 + SMALL, eager=True, nbytes=NBYTES)
        records[target].probed.append((source, probe))
    return [record.report() for record in records]


def trained(true: Conditions, schedule: Schedule, healthy: int = 10, slow: int = 30) -> Estimator:
    """What is known after so many iterations; all is well in the first ones."""
    rng = random.Random(7)
    estimator = Estimator(COUNT, ["one"] * STAGES, None, MESSAGE, split=True)
    for i in range(healthy + slow):
        now = true if i >= healthy else job(None, False)
        if estimator.update(reports(now, schedule, i, rng)):
            estimator.accept()
    return estimator


def schedules() -> dict[str, Schedule]:
    both = {"1f1b": "1f1b", "warmup": "warmup", "adaptive": "adaptive"}
    slow = replace(job(2, False), links={**job(2, False).links, (1, 2): LinkState(60 * MS)})
    return {name: make_plan(slow, policy).schedule for name, policy in both.items()}


@pytest.mark.parametrize("rate", [20e6, 35e6])
@pytest.mark.parametrize("name", ["1f1b", "warmup", "adaptive"])
def test_a_thin_port_is_found_and_iterations_are_predicted(name: str, rate: float) -> None:
    schedule, true = schedules()[name], job(2, True, rate)
    found = trained(true, schedule).conditions()
    assert found.ports.keys() == {2}
    assert found.ports[2] == pytest.approx(rate, rel=0.05)
    for other in schedules().values():
        predicted = simulate(lower(other), found).makespan
        assert predicted == pytest.approx(simulate(lower(other), true).makespan, rel=0.1)


@pytest.mark.parametrize("name", ["1f1b", "warmup", "adaptive"])
def test_two_thin_links_are_no_port(name: str) -> None:
    schedule, true = schedules()[name], job(2, False)
    found = trained(true, schedule).conditions()
    assert found.ports == {}
    for a, b in pairwise(range(1, STAGES)):
        assert found.link(a, b).bandwidth == pytest.approx(RATE, rel=0.05)


@pytest.mark.parametrize("rate", [20e6, 50e6])
@pytest.mark.parametrize("name", ["1f1b", "warmup", "adaptive"])
def test_where_all_links_are_thin_alike_none_is_known_to_be_a_port(name: str, rate: float) -> None:
    """As of hosts that are far from each other; messages that never meet show nothing."""
    everywhere = replace(job(None, False), links=dict.fromkeys(LINKS, LinkState(SMALL, rate)))
    found = trained(everywhere, schedules()[name]).conditions()
    assert found.ports == {}
    for link in LINKS:
        assert found.links[link].bandwidth == pytest.approx(rate, rel=0.05)


def test_one_thin_link_is_no_port() -> None:
    links = {**job(None, False).links, (1, 2): LinkState(SMALL, RATE), (2, 1): LinkState(0.0, RATE)}
    found = trained(replace(job(None, False), links=links), schedules()["warmup"]).conditions()
    assert found.ports == {}


def test_a_port_that_has_healed_is_forgotten() -> None:
    schedule, true = schedules()["warmup"], job(2, True)
    rng, estimator = random.Random(7), trained(true, schedule)
    assert estimator.conditions().ports
    changed = []
    for i in range(20):
        changed += estimator.update(reports(job(None, False), schedule, 30 + i, rng))
        estimator.accept()
    assert changed
    assert estimator.conditions().ports == {}


def test_a_port_that_is_known_later_changes_its_links() -> None:
    """Links are known to be thin; that it is because of a port, only once messages show it."""
    schedule, true, rng = schedules()["warmup"], job(2, True), random.Random(7)
    estimator = Estimator(COUNT, ["one"] * STAGES, None, MESSAGE, split=True)
    own, changed = (
        port_use(
            {1: [message(1.0, 1.02), message(2.0, 2.02)], 3: [message(1.01, 1.03)]},
            {1: 0.0, 3: 0.0},
        ),
        set(),
    )
    for i in range(40):
        row = reports(true if i >= 10 else job(None, False), schedule, i, rng)
        if i < 30:
            row = [replace(one, port=own if one.port else None) for one in row]
        found = estimator.update(row)
        estimator.accept()
        changed |= set(found) if i >= 30 else set()
        assert not estimator.conditions().ports or i >= 30
    assert changed == {link for link in LINKS if 2 in link}
    assert estimator.conditions().ports.keys() == {2}


def message(begin: float, end: float) -> Stamps:
    return Stamps(begin, 0.0, end, eager=True, nbytes=MESSAGE)


@pytest.mark.parametrize("fair", [False, True])
def test_messages_that_share_a_port_one_after_another_or_side_by_side(fair: bool) -> None:
    """TCP connections share a port evenly: two messages that begin together end together."""
    alone = [message(second, second + 0.02) for second in (1.0, 1.5)]
    both = message(2.0, 2.04 if fair else 2.02)
    use = port_use({1: [*alone, both], 3: [message(2.0, 2.04)]}, {1: 0.0, 3: 0.0})
    assert use.nbytes == 4 * MESSAGE
    assert use.seconds == pytest.approx(0.08)
    late = 0.04 if fair else 0.02
    assert use.late2 == pytest.approx(0.02 * late)
    assert use[2:6] == pytest.approx((4, 0.02, 2 * 0.01**2, late))
    assert use.product == pytest.approx(0.01 * late)
    model = PortModel()
    for _ in range(20):
        model.add(use)
    assert model.shared
    assert model.rate == pytest.approx(RATE)


def test_what_two_clocks_differ_by_is_in_the_small_message() -> None:
    there = {1: [message(501.0, 1.02)], 3: [message(301.5, 1.02)]}
    use = port_use(there, {1: -500.0, 3: -300.5})
    assert use == pytest.approx((2 * MESSAGE, 0.02, 2, 0.02, 0.0002, 0.0, 0.0, 0.0))


@pytest.mark.parametrize("overlap", [0.0, 0.01])
def test_messages_that_never_meet_or_always_show_no_port(overlap: float) -> None:
    """What they would take alone, or together, is not known."""
    model, late = PortModel(), 2 * overlap
    always = PortUse(
        2 * MESSAGE, 0.04, 2, 2 * overlap, 2 * overlap**2, late, late**2, overlap * late
    )
    for i in range(20):
        assert not model.silent, i
        model.add(always)
        assert not model.shared
    assert model.silent
    for _ in range(20):
        model.add(port_use({1: [message(1.0, 1.02)], 3: [message(1.01, 1.03), message(2.0, 2.02)]},
                           {1: 0.0, 3: 0.0}))  # fmt: skip
    assert not model.silent


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_receivers_without_a_core_make_no_port_and_hide_none(shared: bool, seed: int) -> None:
    """Half of all messages are late by up to as much as they take, and look as if they met others.

    Each source sends one every 50 ms or so, of 20 ms.
    """
    rng, model = random.Random(seed), PortModel()
    for _ in range(20):
        begins = {1: 0.05 * rng.random(), 3: 0.05 * rng.random()}
        some: dict[int, list[Stamps]] = {1: [], 3: []}
        free = 0.0  # the port
        for _ in range(24):
            source = min(begins, key=begins.__getitem__)
            begin = begins[source]
            end = max(begin, free) + 0.02 if shared else begin + 0.02
            free, late = end, rng.choice((0.0, 0.02 * rng.random()))
            some[source].append(message(begin, end + late))
            begins[source] = max(end, begin + rng.uniform(0.03, 0.07))
        model.add(port_use(some, {1: 0.0, 3: 0.0}))
    assert model.shared == shared


@pytest.mark.parametrize("shared", [False, True])
def test_messages_that_were_held_up_make_no_port_and_hide_none(shared: bool) -> None:
    """One of an iteration's messages takes 30 times as long, as where a core was busy."""
    model, late = PortModel(), 0.01 if shared else 0.0
    for _ in range(20):
        there = [message(second, second + 0.02) for second in range(10, 18)]
        there += [message(2.0, 2.02 + late), message(3.0, 3.62)]
        back = [message(2.01, 2.03 + late), message(4.0, 4.02)]
        model.add(port_use({1: there, 3: back}, {1: 0.0, 3: 0.0}))
    assert model.shared == shared


def test_two_messages_that_met_and_were_late_by_chance_make_no_port() -> None:
    """Every fifth one is as late without meeting any."""
    model, late = PortModel(), [0.0, 0.0, 0.0, 0.0, 0.02]
    for i in range(20):
        there = [message(second, second + 0.02 + late[second % 5]) for second in range(10, 20)]
        pair = [(2.0, 2.04), (2.01, 2.05)] if i == 3 else [(2.0, 2.02), (3.0, 3.02)]
        sources = {1: [*there, message(*pair[0])], 3: [message(*pair[1])]}
        model.add(port_use(sources, {1: 0.0, 3: 0.0}))
        assert not model.shared, i
