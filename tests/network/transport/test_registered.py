"""Memory of messages: the engine's own, which is sent without a copy, and that of receives."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from patience import PATIENCE
from transport.ranks import RankFixture, run

from benchmarks.folder_rendezvous import FolderRendezvous
from megatron_adaptra.transport.engine.endpoint import Endpoint
from megatron_adaptra.transport.engine.transport import End, EngineTransport

SIZE = 3 << 20  # bytes: several pieces


def sends(rank_fixture: RankFixture) -> list[bool]:
    """Whether each message came as it was when its send ended, or began."""
    peer = 1 - rank_fixture.rank
    memory = rank_fixture.transport.registered(SIZE)
    whole, part = torch.empty(SIZE, dtype=torch.uint8), torch.empty(SIZE - 64, dtype=torch.uint8)
    right = []
    for value in (1, 2):
        memory.fill_(value)
        posted = rank_fixture.transport.irecv(whole, peer, value)
        sent = rank_fixture.transport.isend(memory, peer, value)
        posted.wait(PATIENCE)
        sent.wait(PATIENCE)  # only now it may change
        right.append(bool((whole == value).all()))
    # A part of it is memory like any other: it may change at once.
    sent = rank_fixture.transport.isend(memory[64:], peer, 3)
    memory.fill_(9)
    rank_fixture.transport.irecv(part, peer, 3).wait(PATIENCE)
    sent.wait(PATIENCE)
    rank_fixture.meet()
    return [*right, bool((part == 2).all())]


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_send_of_registered_memory(kind: str) -> None:
    assert run(kind, sends) == [[True] * 3] * 2


def test_memory_of_a_receive_stays_while_the_engine_may_write_there(tmp_path: Path) -> None:
    ends = [
        Endpoint(rank, "127.0.0.1", "one", FolderRendezvous(tmp_path), PATIENCE) for rank in (0, 1)
    ]
    for rank in (1, 0):
        ends[rank].connect([1 - rank])

    def posts(end: Endpoint, peer: int) -> weakref.ref[torch.Tensor]:
        buffer = torch.zeros(SIZE, dtype=torch.uint8)
        EngineTransport(end, "forgotten", {peer: End(peer, f"rank {peer}")}).irecv(buffer, peer, 1)
        return weakref.ref(buffer)

    memory = posts(ends[0], 1)
    gc.collect()
    there = memory()
    assert there is not None, "nobody has closed the transport"
    other = EngineTransport(ends[1], "forgotten", {0: End(0, "rank 0")})
    other.isend(torch.ones(SIZE, dtype=torch.uint8), 0, 1).wait(PATIENCE)
    assert bool((there == 1).all())
    del there
    for end in ends:
        end.close()
    gc.collect()
    assert memory() is None
