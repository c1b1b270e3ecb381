"""The wire between the processes of a job: gloo, or our own engine, carries everything.

A Wire opens transports and, for small collectives, groups. Over the engine all those of one wire
share an endpoint; over gloo each has connections of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import PeerLost, reason_of
from megatron_adaptra.emulate.links import LinkEmulator
from megatron_adaptra.transport.base import Transport
from megatron_adaptra.transport.connect import connect, interfaces, new_devices, store_connection
from megatron_adaptra.transport.gloo import GlooTransport, open_links

Links = Sequence[tuple[int, int]]  # source and target, as indices of `ranks`


class Wire(ABC):
    """Connects this process with others; raises PeerLost for a rank that does not come.

    `ranks`: global ones, this process's among them. `name`: the same on all of them, and of nothing
    else.
    """

    name: str

    @abstractmethod
    def transport(
        self,
        name: str,
        ranks: Sequence[int],
        links: Links,
        emulator: LinkEmulator | None = None,
        device: torch.device | None = None,
    ) -> Transport:
        """Return the transport of a pipeline over `links`; its stage i is `ranks[i]`.

        `device`: where messages are.
        """

    @abstractmethod
    def extend(
        self, transport: Transport, name: str, ranks: Sequence[int], links: Links, timeout: float
    ) -> None:
        """Add `links` to an open `transport`, of which each other end does the same.

        Other threads may use its other links meanwhile. `ranks`: as of the transport. `name`: of
        these links alone. `timeout`: seconds for the other ends to come, then PeerLost.
        """

    def probes(
        self, name: str, ranks: Sequence[int], links: Links, emulator: LinkEmulator | None
    ) -> Transport:
        """Return a transport to measure `links` with, both ways; the rest as for `transport`."""
        return self.transport(name, ranks, links, emulator)

    @abstractmethod
    def control(self, name: str, ranks: Sequence[int]) -> Transport:
        """Return a transport between `ranks[0]` and each other one, both ways."""

    @abstractmethod
    def mesh(self, name: str, ranks: Sequence[int]) -> Transport:
        """Return a transport between all of `ranks`, both ways."""

    @abstractmethod
    def group(self, name: str, ranks: Sequence[int], timeout: float) -> Any:
        """Return the group for a FlatAllGather between `ranks`.

        `timeout`: seconds for the others to come, then PeerLost.
        """

    @abstractmethod
    def through(self, rank: int) -> str:
        """Return the interface or the ports here that messages from and to `rank` go through.

        An interface, RDMA ports joined by `+`, or `memory`; empty where that is not known.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what transports and groups share; they are closed before."""


class GlooWire(Wire):
    """A wire of torch's gloo. `devices`: for all but a pipeline's links, which have their own.

    `name`, `ranks`: as for Wire.
    """

    name = "gloo"

    def __init__(self) -> None:
        self.devices = new_devices()

    def transport(
        self,
        name: str,
        ranks: Sequence[int],
        links: Links,
        emulator: LinkEmulator | None = None,
        device: torch.device | None = None,
    ) -> GlooTransport:
        """Raise ValueError for a GPU's `device`."""
        if device is not None and device.type != "cpu":
            raise ValueError(f"messages of {device} need our engine; gloo carries those of a CPU")
        opened = open_links(ranks, links, name, timeout=waits.START)
        return GlooTransport(*opened, emulator)

    def extend(
        self, transport: Transport, name: str, ranks: Sequence[int], links: Links, timeout: float
    ) -> None:
        """Wait `timeout` seconds for each link."""
        assert isinstance(transport, GlooTransport)
        shared = self.devices if transport.two_way else []
        pairs = sorted({(min(link), max(link)) for link in links}) if shared else sorted(links)
        store = store_connection()
        transport.add(*open_links(ranks, pairs, name, "worker", shared, timeout, store))

    def probes(
        self, name: str, ranks: Sequence[int], links: Links, emulator: LinkEmulator | None
    ) -> GlooTransport:
        """Use one connection for both ways."""
        pairs = sorted({(min(link), max(link)) for link in links})
        opened = open_links(ranks, pairs, name, "stage", self.devices, waits.START)
        return GlooTransport(*opened, emulator)

    def control(self, name: str, ranks: Sequence[int]) -> GlooTransport:
        star = [(0, member) for member in range(1, len(ranks))]
        return GlooTransport(*open_links(ranks, star, name, "member", self.devices, waits.START))

    def mesh(self, name: str, ranks: Sequence[int]) -> GlooTransport:
        """Use one connection for both ways."""
        pairs = list(combinations(range(len(ranks)), 2))
        return GlooTransport(*open_links(ranks, pairs, name, "member", self.devices, waits.START))

    def group(self, name: str, ranks: Sequence[int], timeout: float) -> Any:
        store, me = dist.distributed_c10d._get_default_store(), dist.get_rank()
        own = dist.PrefixStore(f"adaptra/{name}", store)
        try:
            return connect(own, ranks.index(me), len(ranks), timeout, self.devices)
        except RuntimeError as error:
            others = ", ".join(f"rank {rank}" for rank in ranks if rank != me)
            raise PeerLost(f"no connection with {others}: {reason_of(error)}") from error

    def through(self, rank: int) -> str:
        """Return the same for each `rank`."""
        return self._interfaces

    @cached_property
    def _interfaces(self) -> str:
        return interfaces()

    def close(self) -> None:
        self.devices = []


Connect = Callable[[str, Sequence[int]], Any]  # `Wire.group`
