"""Memory of the engine's own, which is sent without a copy."""

from __future__ import annotations

import pytest
import torch
from patience import PATIENCE
from transport.ranks import Seat, run

SIZE = 3 << 20  # bytes: several pieces


def sends(seat: Seat) -> list[bool]:
    """Whether each message came as it was when its send ended, or began."""
    peer = 1 - seat.rank
    memory = seat.transport.registered(SIZE)
    whole, part = torch.empty(SIZE, dtype=torch.uint8), torch.empty(SIZE - 64, dtype=torch.uint8)
    right = []
    for value in (1, 2):
        memory.fill_(value)
        posted = seat.transport.irecv(whole, peer, value)
        sent = seat.transport.isend(memory, peer, value)
        posted.wait(PATIENCE)
        sent.wait(PATIENCE)  # only now it may change
        right.append(bool((whole == value).all()))
    # A part of it is memory like any other: it may change at once.
    sent = seat.transport.isend(memory[64:], peer, 3)
    memory.fill_(9)
    seat.transport.irecv(part, peer, 3).wait(PATIENCE)
    sent.wait(PATIENCE)
    seat.meet()
    return [*right, bool((part == 2).all())]


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_send_of_registered_memory(kind: str) -> None:
    assert run(kind, sends) == [[True] * 3] * 2
