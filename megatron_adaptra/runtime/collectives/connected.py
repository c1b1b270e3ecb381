"""Connections between all ranks of a group, for all-reduces by plan."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_adaptra.errors import BadInput, NoConnections, PeerLost, reason_of
from megatron_adaptra.runtime.collectives.exchange import Exchange
from megatron_adaptra.runtime.process_location import ProcessLocation, clock_ids
from megatron_adaptra.transport.address import local_address
from megatron_adaptra.transport.base import Transport
from megatron_adaptra.transport.engine import bindings
from megatron_adaptra.transport.engine.endpoint import Endpoint
from megatron_adaptra.transport.engine.engine_wire import EngineWire, StoreRendezvous
from megatron_adaptra.transport.wire import GlooWire, Wire

_opened: Counter[str] = Counter()  # by name and ranks, how often this process has connected them


@dataclass(frozen=True)
class Connected:
    """All-reduces between the ranks of a group, and the `wire` that they go over.

    Args:
        exchange: this rank's side of them.
        meshes: further transports between all ranks, by name.
        wire: theirs alone.
    """

    exchange: Exchange
    wire: Wire
    meshes: Mapping[str, Transport]

    @classmethod
    def between(
        cls,
        group: dist.ProcessGroup,
        name: str,
        timeout: float,
        transport: str = "auto",
        encrypt: bool = False,
        meshes: Sequence[str] = (),
    ) -> Connected:
        """Connect all ranks of `group`: a collective of it.

        Args:
            group: of torch.distributed, which carries objects.
            name: of the connections' use, the same on all ranks.
            timeout: seconds that a message of another rank is waited for.
            transport: auto, engine or gloo; auto is gloo where a rank lacks the engine.
            encrypt: over TLS, which the engine has.
            meshes: names of further transports to open.

        Raises:
            BadInput: what was asked for by name is not there.
            NoConnections: they cannot be opened, on all ranks for the same reason.
        """
        ranks = dist.get_process_group_ranks(group)
        number = f"{name}/{'-'.join(map(str, ranks))}"
        key = f"{number}/{_opened[number]}"
        _opened[number] += 1
        missing = bindings.missing() if transport != "gloo" else "gloo was asked for"
        missing = missing or (bindings.missing_tls() if encrypt else "")
        gathered: list[Any] = [None] * len(ranks)
        dist.all_gather_object(gathered, (ProcessLocation.here(), missing), group=group)
        locations, lacks = zip(*gathered, strict=True)
        missing = next(filter(None, lacks), "")
        if missing and (encrypt or transport == "engine"):
            field, value = ("encrypt", "on") if encrypt else ("transport", "engine")
            raise BadInput(f"--adaptra-{field}", value, f"not here: {missing}")
        opened: Connected | None = None
        reason = ""
        with contextlib.ExitStack() as unless_open:
            try:
                me = dist.get_rank()
                wire: Wire = GlooWire()
                if not missing:
                    # A plan counts on it that what is sent first arrives first: on several
                    # connections a whole queue of pieces arrives at its end.
                    machine = clock_ids(locations)[ranks.index(me)]
                    rendezvous = StoreRendezvous(f"adaptra/{key}/engine")
                    endpoint = Endpoint(
                        me, local_address(), machine, rendezvous, timeout,
                        encrypted=encrypt, connections=1,
                    )  # fmt: skip
                    wire = EngineWire(endpoint, me)
                unless_open.callback(wire.close)
                data = wire.mesh(f"{key}/data", ranks)
                unless_open.callback(data.close)
                reports = wire.mesh(f"{key}/reports", ranks)
                unless_open.callback(reports.close)
                others = {}
                for one in meshes:
                    others[one] = wire.mesh(f"{key}/{one}", ranks)
                    unless_open.callback(others[one].close)
                names = [f"rank {rank}" for rank in ranks]
                opened = cls(Exchange(data, reports, group.rank(), names, timeout), wire, others)
            except (PeerLost, OSError, RuntimeError) as error:
                reason = reason_of(error)
            reasons: list[Any] = [None] * len(ranks)
            dist.all_gather_object(reasons, reason, group=group)
            reason = next(filter(None, reasons), "")
            if opened is None or reason:
                raise NoConnections(reason)
            unless_open.pop_all()
        return opened

    def close(self) -> None:
        """End the connections; what is under way is aborted."""
        self.exchange.close()
        for transport in self.meshes.values():
            transport.close()
        self.wire.close()
