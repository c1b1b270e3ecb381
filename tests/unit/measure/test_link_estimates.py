"""Links that are late, thin or both are distinguished, and healthy ones are neither."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from measure.traffic import MS, Link, Traffic, healthy
from seeding import new_seed

from megatron_adaptra.measure.estimate import Estimator
from megatron_adaptra.measure.report import StageReport

BASE, STAGE = 1 * MS, 10 * MS
SEED = 20251126  # fixed: a rate of false alarms is never quite zero
ROWS = [(0.0, 20e6), (40 * MS, math.inf), (40 * MS, 20e6)]


def estimator(traffic: Traffic) -> Estimator:
    return Estimator(traffic.count, ["one"] * 2, None, traffic.nbytes)


def feed(estimator: Estimator, traffic: Traffic, count: int) -> list[list[tuple[int, int]]]:
    """The links whose change is confirmed in each iteration; they are planned for at once."""
    found = []
    for _, reports in zip(range(count), traffic.reports(), strict=False):
        found.append(estimator.update(reports))
        if found[-1]:
            estimator.accept()
    return found


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("delay", "bandwidth"), ROWS)
def test_within_a_tenth_after_ten_iterations(
    delay: float, bandwidth: float, together: bool
) -> None:
    rng = random.Random(new_seed())
    link = Link(rng, BASE)
    traffic = Traffic(link, Link(rng, BASE), STAGE, together=together)
    e = estimator(traffic)
    feed(e, traffic, 20)
    link.delay, link.bandwidth = delay, bandwidth
    changed = feed(e, traffic, 10)
    found = e.conditions()
    assert found.link(0, 1).bandwidth == pytest.approx(bandwidth, rel=0.1)
    assert found.link(0, 1).delay == pytest.approx(delay + BASE, rel=0.1, abs=1 * MS)
    assert found.link(1, 0).delay == pytest.approx(BASE, abs=1 * MS)
    assert found.link(1, 0).bandwidth == math.inf
    assert (0, 1) in changed[1]
    # Once more when it has turned out what the bytes take of it, for plans differ.
    assert any((0, 1) in row for row in changed[2:]) == math.isfinite(bandwidth)
    link.delay, link.bandwidth = 0.0, math.inf
    feed(e, traffic, 10)
    assert e.conditions().link(0, 1).bandwidth == math.inf


@pytest.mark.parametrize(("base", "delay", "stage"), [(2.0, 0.0, 10.0), (2.0, 40.0, 5.0)])
def test_healthy_links_are_neither_late_nor_thin(base: float, delay: float, stage: float) -> None:
    """benchmarks/healthy_links.py has the rates."""
    print(f"seed {SEED}")
    traffic = healthy(random.Random(SEED), base * MS, stage * MS, delay * MS)
    e = estimator(traffic)
    feed(e, traffic, 20)
    thin = alarms = 0
    for _ in range(400):
        (changed,) = feed(e, traffic, 1)
        assert changed == []
        alarms += len(e.alarms())
        conditions = e.conditions()
        thin += sum(conditions.wire(*link) > 0 for link in conditions.links)
    assert thin == 0
    assert alarms <= 1


def test_a_stall_is_no_delay() -> None:
    """One message holds up those behind it; they say nothing of the link."""
    rng = random.Random(SEED)
    link = Link(rng, BASE, spikes=0.0, bursts=0.0)
    traffic = Traffic(link, Link(rng, BASE), 2 * MS)
    reports = traffic.reports()
    plain = next(reports)[1].links[0].delay
    link._last = traffic._now + 18 * MS  # nothing comes before
    stalled = next(reports)[1].links[0].delay
    assert stalled < 2 * plain


def without_probes(report: StageReport) -> StageReport:
    links = {a: replace(link, probed=None, busy=()) for a, link in report.links.items()}
    return replace(report, links=links)


def test_without_probes_no_bandwidth_is_known_and_all_is_delay() -> None:
    """What a training did before links were probed."""
    rng = random.Random(SEED)
    traffic = Traffic(Link(rng, BASE, bandwidth=20e6), Link(rng, BASE), 100 * MS)
    e = estimator(traffic)
    for _, reports in zip(range(20), traffic.reports(), strict=False):
        if e.update([without_probes(report) for report in reports]):
            e.accept()
    found = e.conditions().link(0, 1)
    assert found.bandwidth == math.inf
    assert found.delay == pytest.approx(traffic.nbytes / 20e6, rel=0.1)
