"""The all-gather on two levels, or one: who sends to whom, and who is missing."""

from __future__ import annotations

import random
import threading

import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE
from seeding import new_seed
from transport.ranks import Processes

from megatron_adaptra.base.errors import AdaptraError, PeerLost
from megatron_adaptra.execute.small.all_gather import FlatAllGather
from megatron_adaptra.execute.small.hierarchical import HierarchicalAllGather, Links
from megatron_adaptra.transport.connect import connect, new_devices

UNEVEN = (0, 1, 1, 2, 1, 2)  # stages of one, three and two members
SOON = 4.0


def links_of(rank, stages, timeout=PATIENCE, store=None):
    base, devices = store or dist.distributed_c10d._get_default_store(), new_devices()

    def group(name, some):
        own = dist.PrefixStore(f"staged/{name}", base)
        return connect(own, some.index(rank), len(some), PATIENCE, devices)

    names = [f"rank {i}" for i in range(len(stages))]
    return Links(group, rank, stages, names, timeout)


def everywhere(body, *args, ranks):
    with Processes(body, *args, ranks=ranks) as processes:
        return [processes.result(rank) for rank in range(ranks)]


def word(*numbers):
    return torch.tensor(numbers, dtype=torch.uint8)


def many_all_gathers(me, stages, seed):
    """Over two exchanges by turns, sent early and received late."""
    rng, mine = random.Random(seed), random.Random(seed + me.rank)
    links = links_of(me.rank, stages)
    exchanges = [links.open(300), links.open(300)]
    flat = len(set(stages)) == len(stages)
    assert all(isinstance(e, HierarchicalAllGather) != flat and e.me == me.rank for e in exchanges)
    for number in range(40):
        sent = []
        for exchange in exchanges:
            lengths = [rng.choice((0, 1, rng.randrange(300), 300)) for _ in stages]
            sent.append([torch.full((n,), (number + i) % 251) for i, n in enumerate(lengths)])
            exchange.start(sent[-1][me.rank].byte())
            threading.Event().wait(mine.choice((0, 0, 2e-3)))
        for exchange, values in zip(exchanges, sent, strict=True):
            received = exchange.wait()
            assert all(torch.equal(a, b.byte()) for a, b in zip(received, values, strict=True))
    return True


@pytest.mark.parametrize("stages", [UNEVEN, (1, 0, 0), (0, 1, 0, 1, 2), (0, 1, 2)])
def test_all_get_what_each_has_sent(stages):
    assert all(everywhere(many_all_gathers, stages, new_seed(), ranks=len(stages)))


def faster(me, stages, slow):
    """All but one are an exchange ahead: they have received, and sent again."""
    exchange = links_of(me.rank, stages).open(8)
    exchange.start(word(me.rank))
    if me.rank != slow:
        first = exchange.wait()
        exchange.start(word(me.rank, 1))
    me.meet()
    if me.rank == slow:
        first = exchange.wait()
        exchange.start(word(me.rank, 1))
    assert [v.tolist() for v in first] == [[i] for i in range(len(stages))]
    assert [v.tolist() for v in exchange.wait()] == [[i, 1] for i in range(len(stages))]
    return True


def test_nobody_waits_for_another_to_wait():
    assert all(everywhere(faster, UNEVEN, 1, ranks=6))  # a leader


def twice(me, stages):
    """Starts it again before it has ended, which is refused, and ends it."""
    exchange = links_of(me.rank, stages).open(8)
    exchange.start(word(me.rank))
    with pytest.raises(AdaptraError, match="in flight"):
        exchange.start(word(99))
    assert [v.tolist() for v in exchange.wait()] == [[i] for i in range(len(stages))]
    return len(exchange.run(word(me.rank)))


@pytest.mark.parametrize("stages", [(0, 1, 2), (0, 0, 1)])  # on one level, and on two
def test_only_one_is_in_flight(stages):
    assert everywhere(twice, stages, ranks=3) == [3] * 3


def one_goes(me, stages, lost):
    exchange = links_of(me.rank, stages, SOON).open(8)
    exchange.run(word(me.rank))
    me.meet()
    if me.rank == lost:
        me.say("ready")
        threading.Event().wait(PATIENCE)
    try:
        exchange.run(word(me.rank))
    except PeerLost as error:
        return str(error)


@pytest.mark.parametrize(
    ("stages", "lost", "silent"),  # a leader, a member, and on one level
    [(UNEVEN, 1, False), (UNEVEN, 2, True), ((0, 1, 2), 2, False)],
)
def test_all_name_the_missing_rank(stages, lost, silent):
    with Processes(one_goes, stages, lost, ranks=len(stages)) as processes:
        assert processes.reported(lost) == "ready"
        if not silent:
            processes.kill(lost)
        words = [processes.result(rank) for rank in range(len(stages)) if rank != lost]
    named = [
        f"waited for rank {lost} to send its part of all-gather 1" in printed for printed in words
    ]
    assert all(named), words


class Listener:
    """A group whose sends are noted."""

    def __init__(self, group, sent):
        self._group, self._sent = group, sent

    def __getattr__(self, name):
        return getattr(self._group, name)

    def send(self, tensors, peer, tag):
        self._sent.append(tensors[0].numel())
        return self._group.send(tensors, peer, tag)


def crossing(me, stages):
    links = links_of(me.rank, stages)
    sent = [[] for _ in links.groups]
    links.groups = [Listener(g, s) for g, s in zip(links.groups, sent, strict=True)]
    exchange = links.open(100)
    for _ in range(5):
        exchange.run(word(me.rank))
    me.meet()
    return sent


def test_only_leaders_cross_stages():
    sent = everywhere(crossing, UNEVEN, ranks=6)
    leaders, size = {0: 1, 1: 3, 3: 2}, {}
    for rank, (up, down, *across) in enumerate(sent):
        if rank in leaders:
            size[rank] = {*across[0]}
            assert len(up) == 0
            assert len(down) == 5 * (leaders[rank] - 1)
            assert len(across[0]) == 5 * 2
        else:
            assert (len(up), down, across) == (5, [], [])
    # The value and its length, of each member, and a header; not the whole buffer.
    assert size == {rank: {16 + 9 * members} for rank, members in leaders.items()}


def test_one_member_a_stage_needs_no_second_level():
    links = links_of(0, [0], store=dist.HashStore())
    assert isinstance(links.open(8), FlatAllGather)
    assert len(links.groups) == 1
