"""The ways a message can take between the two ranks of a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist

from megatron_adaptra.transport.address import local_address
from megatron_adaptra.transport.base import Work
from megatron_adaptra.transport.engine.endpoint import Endpoint
from megatron_adaptra.transport.engine.engine_wire import StoreRendezvous
from megatron_adaptra.transport.engine.rails import Rail
from megatron_adaptra.transport.engine.transport import End, EngineTransport

TIMEOUT = 120.0  # seconds for a message
Pending: TypeAlias = "Work | _GlooPending"  # a send or a receive under way


class BenchPath(Protocol):
    """A path carries messages to the other rank and back."""

    name: str

    def memory(self, nbytes: int) -> torch.Tensor:
        """Return `nbytes` to send from, which may be written to again when the send is over."""
        ...

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        """Start to send; `tag`: of no other message under way."""
        ...

    def receive(self, tensor: torch.Tensor, tag: int) -> Pending:
        """Start to receive the message of that `tag`."""
        ...


class GlooPath(BenchPath):
    """torch.distributed's own isend and irecv, to and from rank `peer`."""

    name = "gloo"

    def __init__(self, peer: int) -> None:
        self._peer = peer

    def memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        return _GlooPending(dist.isend(tensor, self._peer, tag=tag))

    def receive(self, tensor: torch.Tensor, tag: int) -> Pending:
        return _GlooPending(dist.irecv(tensor, self._peer, tag=tag))


class _GlooPending:
    def __init__(self, work: dist.Work | None) -> None:
        assert work is not None  # as for a rank outside the group
        self._work = work

    def wait(self, timeout: float) -> object:
        return self._work.wait(timedelta(seconds=timeout))


class EnginePath(BenchPath):
    """The engine over one kind of path, `name`: shm, tcp or verbs, from `rank` to `peer`.

    It has an endpoint of its own. `ports`: of RDMA, for verbs.
    """

    def __init__(self, name: str, rank: int, peer: int, ports: Sequence[Rail] = ()) -> None:
        self.name, self._peer = name, peer
        machine = "here" if name == "shm" else f"of {rank}"
        self._endpoint = open_endpoint(name, rank, machine, ports)
        self._endpoint.connect([peer])
        self._transport = EngineTransport(self._endpoint, name, {peer: End(peer, f"rank {peer}")})

    def memory(self, nbytes: int) -> torch.Tensor:
        """Register the `nbytes`, so that no more is copied than by gloo."""
        return self._transport.registered(nbytes)

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        return self._transport.isend(tensor, self._peer, tag)

    def receive(self, tensor: torch.Tensor, tag: int) -> Pending:
        return self._transport.irecv(tensor, self._peer, tag)

    def close(self) -> None:
        """End its connections."""
        self._transport.close()
        self._endpoint.close()


def open_endpoint(name: str, rank: int, machine: str, ports: Sequence[Rail] = ()) -> Endpoint:
    """Open the endpoint of `rank` in the group of endpoints of this `name`.

    Memory is shared between ranks of the same `machine`. `ports`: of RDMA; if there are any, only
    they are used.
    """
    rendezvous, host = StoreRendezvous(f"adaptra/bench/{name}"), local_address()
    return Endpoint(rank, host, machine, rendezvous, TIMEOUT, fallback=not ports, ports=ports)
