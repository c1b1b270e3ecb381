"""RDMA ports are connected to peers with large messages alone.

No device is here: what is seen is whether an endpoint tries to open one.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import PATIENCE
from transport.ranks import until

from benchmarks.folder_rendezvous import FolderRendezvous
from megatron_adaptra.transport.engine.endpoint import Endpoint
from megatron_adaptra.transport.engine.engine_wire import EngineWire
from megatron_adaptra.transport.engine.rails import Rail
from megatron_adaptra.transport.engine.transport import LARGE

RAILS = [Rail("none_0", 1), Rail("none_1", 1)]
RANKS = [0, 1]


class Two:
    """Two ranks of a job in one process, `machines` apart or on one of them."""

    def __init__(self, folder: Path, apart: bool, ports: list[Rail]) -> None:
        rendezvous = FolderRendezvous(folder)
        self.endpoints = [
            Endpoint(
                rank, "127.0.0.1", f"of {rank}" if apart else "of both", rendezvous, PATIENCE,
                ports=ports,
            )
            for rank in RANKS
        ]  # fmt: skip
        self.wires = [EngineWire(endpoint, rank) for rank, endpoint in enumerate(self.endpoints)]

    def opened(self, method: str, *args: Any) -> list[Any]:
        """What a method of the wire opens, on each rank."""
        with ThreadPoolExecutor() as pool:
            both = [pool.submit(getattr(wire, method), "x", RANKS, *args) for wire in self.wires]
            found = [one.result(PATIENCE) for one in both]
        until(lambda: not self.dialling() - {0, 1}, "the network is connected")
        return found

    def dialling(self) -> set[int | None]:
        """Rails that a path is looked for over, None for TCP."""
        peer = self.endpoints[1]._peers.get(0)  # the higher rank dials
        return set() if peer is None else set(peer.dialling)

    def close(self) -> None:
        for wire in self.wires:
            wire.close()


@pytest.fixture(params=[(True, RAILS)], ids=["apart"])
def two(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path, *request.param)
    yield made
    made.close()


def exchange(ends: list[Any], nbytes: int) -> None:
    """A message of so many bytes from the first rank to the second."""
    arrived = torch.zeros(nbytes, dtype=torch.uint8)
    receive = ends[1].irecv(arrived, 0, 3)
    send = ends[0].isend(torch.ones(nbytes, dtype=torch.uint8), 1, 3)
    receive.wait(PATIENCE)
    send.wait(PATIENCE)
    assert arrived.all()


def test_control_connections_have_none(two: Two) -> None:
    """However large a plan is."""
    exchange(two.opened("control"), 4 * LARGE)
    assert two.dialling() == set()


def test_small_messages_need_none_and_the_first_large_one_does(two: Two) -> None:
    ends = two.opened("mesh")
    for _ in range(3):
        exchange(ends, LARGE - 1)
    assert two.dialling() == set()
    exchange(ends, LARGE)  # which waits for no rail
    assert two.dialling() == {0, 1}
    exchange(ends, LARGE)


def test_a_group_for_small_collectives_needs_none(two: Two) -> None:
    """Its receives have room for more than comes."""
    groups = two.opened("group", PATIENCE)
    arrived, sent = torch.zeros(2 * LARGE, dtype=torch.uint8), torch.ones(8, dtype=torch.uint8)
    receive = groups[1].recv([arrived], 0, 3)
    send = groups[0].send([sent], 1, 3)
    for work in (receive, send):
        work.wait(timedelta(seconds=PATIENCE))
    assert int(arrived.sum()) == 8
    assert two.dialling() == set()


@pytest.mark.parametrize("method", ["transport", "probes"])
def test_a_pipeline_has_them_from_the_beginning(two: Two, method: str) -> None:
    """What measures a link goes where messages of the pipeline will go."""
    two.opened(method, [(0, 1)], *[None] * (method == "probes"))
    assert two.dialling() == {0, 1}


@pytest.mark.parametrize("two", [(False, RAILS), (True, [])], ids=["memory", "none"], indirect=True)
def test_none_is_looked_for_where_there_is_memory_or_no_port(two: Two) -> None:
    ends = two.opened("mesh")
    exchange(ends, LARGE)
    assert two.dialling() == set()
