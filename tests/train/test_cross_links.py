"""Links between replicas, by real processes: opened for a proposal, by both ends or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from patience import PATIENCE
from transport.ranks import Processes, RankFixture

from megatron_adaptra.adapter.pipeline.cross_links import CrossLinks, crossing
from megatron_adaptra.agree.agreement import Proposal
from megatron_adaptra.agree.bundle import LINKS, SCHEDULE, Bundle, Links
from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import BadBundle, PeerLost
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan.pipeline.fixed import first_schedule
from megatron_adaptra.transport.engine.endpoint import Endpoint
from megatron_adaptra.transport.engine.engine_wire import EngineWire, StoreRendezvous
from megatron_adaptra.transport.wire import GlooWire, Wire

KINDS = ("gloo", "shm")
OWN = [(0, 1), (1, 0), (2, 3), (3, 2)]  # of two replicas of two stages
CROSS = Links(frozenset({(0, 3), (1, 2)}))


def swapped() -> Schedule:
    """The replicas exchange their last stages."""
    start = first_schedule(2, 4, 9.0).replicated(2)
    a, b, c, d = start.order
    return Schedule((a, d, c, b), 4, policy="swap", replicas=2)


HOME = Bundle({SCHEDULE: first_schedule(2, 4, 9.0).replicated(2), LINKS: Links()})


def opened(kind: str, rank: int) -> tuple[Wire, dict[str, Any], CrossLinks]:
    """What a worker of four has: its own links, and those to come."""
    wire: Wire = GlooWire()
    if kind != "gloo":
        rendezvous = StoreRendezvous("adaptra/of-a-test")
        wire = EngineWire(Endpoint(rank, "127.0.0.1", "one", rendezvous, PATIENCE), rank)
    mine = [link for link in OWN if rank in link]
    transports = {
        "pipeline": wire.transport("pipeline", range(4), mine),
        "probes": wire.probes("probes", range(4), mine, None),
    }
    return wire, transports, CrossLinks(rank, 2, range(4), wire, transports)


def closed(wire: Wire, transports: dict[str, Any], me: RankFixture) -> None:
    me.meet()
    for transport in transports.values():
        transport.close()
    wire.close()


def exchanged(transport: Any, rank: int, peer: int, tag: int) -> float:
    """What the peer has sent, which is its rank."""
    send = transport.isend(torch.full((4,), float(rank)), peer, tag)
    buffer = torch.zeros(4)
    transport.irecv(buffer, peer, tag).wait(PATIENCE)
    send.wait(PATIENCE)
    return float(buffer[0])


def proposal(key: str, **values: Any) -> Proposal:
    kinds = {"links": LINKS, "schedule": SCHEDULE}
    return Proposal(0, 3, Bundle({kinds[name]: value for name, value in values.items()}), key)


def messages(me: RankFixture, kind: str) -> list[float]:
    wire, transports, cross = opened(kind, me.rank)
    peer = 3 - me.rank
    cross.open(proposal("0", links=CROSS), HOME)
    found = [exchanged(t, me.rank, peer, tag) for tag, t in enumerate(transports.values())]
    assert cross.keep(CROSS) == [peer]
    assert cross.keep(CROSS) == []
    before = transports["pipeline"], exchanged(transports["pipeline"], me.rank, me.rank ^ 1, 9)
    cross.open(proposal("1", links=CROSS, schedule=swapped()), HOME)  # nothing is opened again
    found.append(exchanged(transports["pipeline"], me.rank, peer, 10))
    closed(wire, transports, me)
    return [*found, before[1]]


@pytest.mark.parametrize("kind", KINDS)
def test_messages_cross_and_those_within_replicas_go_on(kind: str) -> None:
    with Processes(messages, kind, ranks=4, kind=kind) as processes:
        found = [processes.result(rank) for rank in range(4)]
    assert found == [[3 - r, 3 - r, 3 - r, r ^ 1] for r in range(4)]


def refused_first(me: RankFixture, kind: str) -> tuple[str, float]:
    """Workers 1 and 2 do not take part in the first proposal: then all open their links anew."""
    waits.CROSS = PATIENCE if me.rank in (0, 3) else 0.5
    wire, transports, cross = opened(kind, me.rank)
    why = ""
    if me.rank in (0, 3):
        both = Links(frozenset({(0, 3), (2, 3)}))  # of which the second is within a replica
        with pytest.raises(BadBundle, match="its links join workers 2 and 3"):
            cross.open(proposal("0", links=both), HOME)
        cross.open(proposal("1", links=CROSS), HOME)
    if me.rank == 1 and kind == "gloo":
        with pytest.raises(PeerLost) as error:
            cross.open(proposal("1", links=CROSS), HOME)
        why = str(error.value)
    me.meet()
    waits.CROSS = PATIENCE
    cross.open(proposal("2", links=CROSS), HOME)
    got = exchanged(transports["pipeline"], me.rank, 3 - me.rank, 1)
    closed(wire, transports, me)
    return why, got


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_opened_for_a_refused_proposal_is_opened_again(kind: str) -> None:
    with Processes(refused_first, kind, ranks=4, kind=kind) as processes:
        found = [processes.result(rank) for rank in range(4)]
    assert [got for _, got in found] == [3.0, 2.0, 1.0, 0.0]
    assert found[1][0].startswith("worker 2 (rank 2): no connection" if kind == "gloo" else "")


def test_a_schedule_needs_the_links_that_it_uses() -> None:
    cross = CrossLinks(0, 2, range(4), GlooWire(), {})
    assert crossing(swapped()) == CROSS.pairs
    assert crossing(HOME[SCHEDULE]) == frozenset()
    with pytest.raises(BadBundle, match=r"it uses links that are not there: \[\(0, 3\), \(1, 2\)"):
        cross.open(proposal("0", schedule=swapped()), HOME)
    for pair in ((0, 2), (1, 4), (0, 1)):  # one stage; no such worker; one replica
        with pytest.raises(BadBundle, match="its links join workers"):
            cross.open(proposal("0", links=Links(frozenset({pair}))), HOME)
