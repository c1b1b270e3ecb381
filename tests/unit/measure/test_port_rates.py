"""A slow port and a slow path are distinguished, by probes."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common import equal_ports
from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.conditions import LinkState
from megatron_adaptra.measure.all_reduce_estimate import PortRates
from megatron_adaptra.sim.ports import Ports

MB = 1e6
SEED = 20251126  # fixed: a rate of false alarms is never quite zero


def probed(ports, rng=None, noise=0.0):
    """What paths pass, each with its ports to itself."""
    ranks, found = range(len(ports.out)), {}
    for way in ((a, b) for a in ranks for b in ranks if a != b):
        path = ports.paths.get(way, LinkState())
        rate = min(ports.out[way[0]], ports.into[way[1]], path.bandwidth)
        found[way] = rate * (rng.lognormvariate(0, noise) if rng else 1.0)
    return found


def run(rates, count, ports, **more):
    """What is decided in so many iterations, from 1 on: iteration, words."""
    found = []
    for i in range(1, count + 1):
        if rates.update(probed(ports, **more)):
            found.append((i, rates.changes(range(rates.ranks))))
            rates.accept()
            assert rates.changes(range(rates.ranks)) == []
    return found


def test_ports_that_differ_by_chance_alone_are_equal():
    rng, rates = random.Random(SEED), PortRates(8)
    for _ in range(5):
        rates.update(probed(equal_ports([20 * MB] * 8), rng, 0.05))
    ports = rates.ports()
    assert (len(set(ports.out)), len(set(ports.into)), ports.paths) == (1, 1, {})
    assert ports.out[0] == pytest.approx(20 * MB, rel=0.1)


@pytest.mark.parametrize("noise", [0.02, 0.06, 0.1])
def test_noisy_paths_are_not_slow_and_a_slow_one_is(noise):
    """A port counts as its fastest path of seven, which chance alone makes faster than others."""
    print(f"seed {SEED}")
    rng, trials = random.Random(SEED), 100
    slow = equal_ports([20 * MB] * 8, paths={(2, 3): LinkState(0.0, 8 * MB)})
    alarms, found = 0, 0
    for _ in range(trials):
        healthy, one = PortRates(8), PortRates(8)
        for _ in range(5):
            healthy.update(probed(equal_ports([20 * MB] * 8), rng, noise))
            one.update(probed(slow, rng, noise))
        alarms += bool(healthy.ports().paths)
        found += list(one.ports().paths) == [(2, 3)]
    assert alarms <= 0.05 * trials
    assert found >= 0.95 * trials


def ordinary(ranks=4):
    rates = PortRates(ranks)
    assert not rates.known
    assert run(rates, 10, equal_ports([20 * MB] * ranks)) == [(3, [])]
    assert rates.known
    return rates


SLOW_OUT = Ports((20 * MB, 20 * MB, 10 * MB, 20 * MB), (20 * MB,) * 4)
SLOW_IN = Ports((20 * MB,) * 4, (20 * MB, 5 * MB, 20 * MB, 20 * MB))
SLOW_PATH = Ports((20 * MB,) * 4, (20 * MB,) * 4, paths={(2, 3): LinkState(0.0, 8 * MB)})


@pytest.mark.parametrize(
    ("ports", "words"),
    [
        (SLOW_OUT, ["rank 2 sends 10 MB/s, before 20 MB/s"]),
        (SLOW_IN, ["rank 1 receives 5 MB/s, before 20 MB/s"]),
        (SLOW_PATH, ["path 2>3 passes 8 MB/s"]),
        (
            equal_ports([20 * MB, 20 * MB, 20 * MB, 10 * MB]),
            ["rank 3 receives 10 MB/s, before 20 MB/s", "rank 3 sends 10 MB/s, before 20 MB/s"],
        ),
    ],
)  # fmt: skip
def test_what_is_slow_is_named_and_heals(ports, words):
    rates = ordinary()
    ((i, found),) = run(rates, 10, ports)
    assert (found, i) == (words, 3)
    assert rates.ports(1e-3, 1e-4) == Ports(ports.out, ports.into, 1e-3, 1e-4, paths=ports.paths)
    ((_, found),) = run(rates, 10, equal_ports([20 * MB] * 4))
    assert len(found) == len(words)
    assert rates.ports() == equal_ports([20 * MB] * 4)


def test_a_port_that_is_slow_from_the_start():
    assert run(PortRates(4), 10, SLOW_OUT) == [(3, ["rank 2 sends 10 MB/s, others 20 MB/s"])]


def test_of_two_ranks_a_path_counts_as_their_ports():
    rates = PortRates(2)
    run(rates, 5, equal_ports([20 * MB] * 2, paths={(0, 1): LinkState(0.0, 5 * MB)}))
    assert rates.ports() == Ports((5 * MB, 20 * MB), (20 * MB, 5 * MB))


def test_noise_changes_no_port():
    """Rates that vary by 8 %; two of five samples may be far off."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    rates, changes = PortRates(4), 0
    for _ in range(500):
        now = probed(equal_ports([20 * MB] * 4), rng, 0.03)
        if rng.random() < 0.1:
            now[rng.choice(sorted(now))] *= 0.2
        if rates.update(now):
            changes += 1
            rates.accept()
    assert changes <= 3


@given(
    st.lists(
        st.dictionaries(
            st.tuples(st.integers(-1, 3), st.integers(-1, 3)),
            st.floats(allow_nan=True, allow_infinity=True) | st.floats(1, 1e9),
        ),
        max_size=12,
    )
)
def test_whatever_comes_ports_are_ports(rows):
    rates = PortRates(3)
    for row in rows:
        changed = rates.update(row)
        rates.changes(range(rates.ranks))
        if rates.known:
            ports = rates.ports()
            assert all(0 < rate < math.inf for rate in ports.out + ports.into)
        if changed:
            rates.accept()
            assert rates.changes(range(rates.ranks)) == []


def test_bad_input():
    with pytest.raises(BadInput, match=r"^ranks 1: at least 2"):
        PortRates(1)
    with pytest.raises(BadInput, match=r"^ports 'not all measured'"):
        PortRates(2).ports()
