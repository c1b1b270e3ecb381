"""Probes of links, over the transport that needs no network."""

import time

import pytest
from patience import PATIENCE
from transport.loopback import LoopbackNetwork

from megatron_adaptra.errors import PeerLost
from megatron_adaptra.telemetry.link_probe import AHEAD, LinkProbes


def taken(probes, count):
    """So many of them, or all that come in time."""
    found, end = [], time.monotonic() + PATIENCE
    while len(found) < count and time.monotonic() < end:
        found += probes.take()
    return found


def test_every_exchange_measures_both_directions():
    network = LoopbackNetwork()
    ends = [LinkProbes(network.open(stage), [1 - stage]) for stage in range(2)]
    for _ in range(3 * AHEAD):
        for end in ends:
            end.exchange()
        for stage, end in enumerate(ends):
            ((source, stamps),) = taken(end, 1)
            assert source == 1 - stage
            assert stamps.completed >= stamps.sent > 0
    for end in ends:
        end.close()
    network.close()


def test_more_are_under_way_than_stand_posted():
    """A link may be slower than an iteration."""
    network = LoopbackNetwork()
    one, two = (LinkProbes(network.open(stage), [1 - stage]) for stage in range(2))
    for _ in range(2 * AHEAD):
        one.exchange()
    assert len(taken(two, 2 * AHEAD)) == 2 * AHEAD
    assert one.take() == []
    one.close()
    two.close()
    network.close()


def test_a_neighbour_that_has_gone_is_an_error():
    network = LoopbackNetwork()
    one, two = (LinkProbes(network.open(stage), [1 - stage]) for stage in range(2))
    one.close()
    with pytest.raises(PeerLost):
        one.exchange()
    two.close()
    network.close()


def test_a_slow_direction_shows_in_its_own_probes():
    network = LoopbackNetwork(delay={(0, 1): 0.2})
    ends = [LinkProbes(network.open(stage), [1 - stage]) for stage in range(2)]
    for end in ends:
        end.exchange()
    ((_, slow),), ((_, fast),) = taken(ends[1], 1), taken(ends[0], 1)
    assert slow.delay >= 0.2 > fast.delay
    for end in ends:
        end.close()
    network.close()


def test_a_large_one_now_and_then_takes_a_hundredth_of_the_bytes():
    """The first one at once, and then as many messages of the pipeline later as it weighs."""
    network, nbytes, messages = LoopbackNetwork(), 1000, 8
    one, two = (LinkProbes(network.open(stage), [1 - stage], nbytes) for stage in range(2))
    found = []
    for i in range(40):
        one.exchange(messages)
        found += [i for _, stamps in taken(two, 1 + (i % 13 == 0)) if stamps.nbytes == nbytes]
    assert found == [0, 13, 26, 39]
    for _ in range(20):  # those of the pipeline are ours
        one.exchange()
        ((_, stamps),) = taken(two, 1)
        assert stamps.nbytes < nbytes
    one.close()
    two.close()
    network.close()
