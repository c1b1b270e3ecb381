"""Drawn delays: the right distribution, the same for the same seed, and nothing else changes."""

from dataclasses import replace
from random import Random
from statistics import fmean, pstdev

import pytest

from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.sim.jitter import draws, lognormal

LINKS = {
    (0, 1): LinkState(0.03, 1e9, 0.006),
    (1, 0): LinkState(0.03, 1e9, 0.006),
    (1, 2): LinkState(0.01),
}
JOB = Conditions(
    6, (1e-3,) * 3, (1e-3,) * 3, (1e-3,) * 3, LINKS, message_bytes=10.0, step_seconds=0.01
)


@pytest.mark.parametrize("share", [0.05, 0.5, 2.0])
def test_mean_and_deviation_are_the_links(share):
    random = Random(1)
    values = [lognormal(random, 0.04, 0.04 * share) for _ in range(100_000)]
    assert min(values) > 0
    assert fmean(values) == pytest.approx(0.04, rel=0.03)
    # The deviation of a sample with so long a tail converges slowly.
    assert pstdev(values) == pytest.approx(0.04 * share, rel=0.02 if share < 1 else 0.15)


def test_a_tail_to_the_right():
    random = Random(2)
    values = sorted(lognormal(random, 1.0, 0.5) for _ in range(20_000))
    assert values[10_000] < 1.0
    assert values[-200] - 1.0 > 1.0 - values[200]


def test_the_same_seed_draws_the_same():
    assert list(draws(JOB, 5, 7)) == list(draws(JOB, 5, 7))
    assert list(draws(JOB, 3, 7)) == list(draws(JOB, 5, 7))[:3]
    assert list(draws(JOB, 5, 7)) != list(draws(JOB, 5, 8))


def test_the_order_in_which_links_were_given_does_not_matter():
    turned = replace(JOB, links=dict(reversed(LINKS.items())))
    assert list(draws(JOB, 3, 7)) == list(draws(turned, 3, 7))


def test_each_direction_has_a_delay_of_its_own_and_the_rest_stays():
    for one in draws(JOB, 20, 3):
        assert one.link(0, 1).delay != one.link(1, 0).delay
        assert one.link(0, 1).bandwidth == 1e9
        assert one.link(1, 2) == LINKS[1, 2]
        assert replace(one, links=LINKS) == JOB


def test_drawing_nothing_and_a_deviation_beyond_all_measure():
    assert list(draws(JOB, 0, 0)) == []
    wild = replace(JOB, links={(0, 1): LinkState(1e-3, jitter=1e200)})
    for one in draws(wild, 50, 0):
        assert one.link(0, 1).delay >= 0
