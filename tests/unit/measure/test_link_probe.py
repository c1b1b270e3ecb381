"""Probes of links, over the transport that needs no network."""

import time

import torch
from patience import PATIENCE, longer_and_longer
from transport.loopback import LoopbackNetwork

from megatron_adaptra.measure.link_probe import AHEAD, FIRST, KEPT, NBYTES, SHARE, LinkProbes


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


def test_a_neighbour_that_has_gone_is_not_measured_any_more():
    network = LoopbackNetwork()
    one, two = (LinkProbes(network.open(stage), [1 - stage]) for stage in range(2))
    one.close()
    one.exchange()
    assert one.take() == []
    assert "closed" in one.faults[1]
    two.close()
    network.close()


def test_probes_that_do_not_come_are_given_up_and_others_go_on():
    network = LoopbackNetwork()
    ends = [LinkProbes(network.open(s), n) for s, n in enumerate([[1], [0, 2], [1]])]
    for i in range(2 * KEPT):
        for end in ends[:2]:  # stage 2 sends nothing
            end.exchange()
        assert len(taken(ends[0], 1)) == 1
        assert [source for source, _ in taken(ends[1], 1)] == [0]
        assert (2 in ends[1].faults) == (i >= KEPT)
    assert ends[1].faults == {2: f"none of the last {KEPT} has come"}
    assert ends[0].faults == {}
    for end in ends:
        end.close()
    network.close()


def test_what_is_no_probe_is_not_measured():
    network = LoopbackNetwork()
    transport = network.open(0)
    probes = LinkProbes(network.open(1), [0])
    transport.isend(torch.zeros(NBYTES + 1, dtype=torch.uint8), 1, 0)
    end = time.monotonic() + PATIENCE
    while not probes.faults and time.monotonic() < end:
        assert probes.take() == []
    assert "bytes" in probes.faults[0]
    probes.close()
    transport.close()
    network.close()


def test_a_slow_direction_shows_in_its_own_probes():
    for delay in longer_and_longer(0.2):
        network = LoopbackNetwork(delay={(0, 1): delay})
        ends = [LinkProbes(network.open(stage), [1 - stage]) for stage in range(2)]
        for end in ends:
            end.exchange()
        ((_, slow),), ((_, fast),) = taken(ends[1], 1), taken(ends[0], 1)
        for end in ends:
            end.close()
        network.close()
        assert slow.delay >= delay
        if fast.delay < delay:
            return
    raise AssertionError(f"the other way took {fast.delay} s")


def test_a_large_one_now_and_then_takes_a_hundredth_of_the_bytes():
    """The first ones at once, and then as many messages of the pipeline later as they weigh."""
    network, nbytes, messages = LoopbackNetwork(), 1000, 8
    one, two = (LinkProbes(network.open(stage), [1 - stage], nbytes) for stage in range(2))
    found = []
    due = [*range(FIRST), 74, 87]  # 0.08 per iteration, as soon as the first ones are made up for
    for i in range(100):
        one.exchange(messages)
        found += [i for _, stamps in taken(two, 1 + (i in due)) if stamps.nbytes == nbytes]
        assert i < due[FIRST] or len(found) <= SHARE * messages * (i + 1)
    assert found == due
    for _ in range(20):  # those of the pipeline are ours
        one.exchange()
        ((_, stamps),) = taken(two, 1)
        assert stamps.nbytes < nbytes
    one.close()
    two.close()
    network.close()
