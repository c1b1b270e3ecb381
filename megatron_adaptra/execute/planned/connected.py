"""Connections between all ranks of a group, for all-reduces by plan."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_adaptra.base.errors import BadInput, NoConnections, PeerLost, reason_of
from megatron_adaptra.execute.planned.exchange import Exchange
from megatron_adaptra.execute.process_location import ProcessLocation, clock_ids
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
            group: of torch.distributed.
            name: of the connections' use, the same on all ranks.
            timeout: seconds that a message of another rank is waited for.
            transport: auto, engine or gloo; auto is gloo where a rank lacks the engine.
            encrypt: over TLS, which the engine has.
            meshes: names of further transports to open, the same on all ranks.

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
        gathered = _gather(group, (ProcessLocation.here(), missing))
        locations, lacks = zip(*gathered, strict=True)
        missing = next(filter(None, lacks), "")
        if missing and (encrypt or transport == "engine"):
            field, value = ("encrypt", "on") if encrypt else ("transport", "engine")
            raise BadInput(f"--adaptra-{field}", value, f"not here: {missing}")
        opened: list[Transport] = []
        reason = ""
        with contextlib.ExitStack() as unless_open:
            try:
                wire: Wire = GlooWire()
                if not missing:
                    # A plan counts on it that what is sent first arrives first: on several
                    # connections a whole queue of pieces arrives at its end.
                    me = dist.get_rank()
                    machine = clock_ids(locations)[ranks.index(me)]
                    rendezvous = StoreRendezvous(f"adaptra/{key}/engine")
                    endpoint = Endpoint(
                        me, local_address(), machine, rendezvous, timeout,
                        encrypted=encrypt, connections=1,
                    )  # fmt: skip
                    wire = EngineWire(endpoint, me)
                unless_open.callback(wire.close)
                for mesh in ("data", "reports", *meshes):
                    opened.append(wire.mesh(f"{key}/{mesh}", ranks))
                    unless_open.callback(opened[-1].close)
            except (PeerLost, OSError, RuntimeError) as error:
                reason = reason_of(error)
            reason = next(filter(None, _gather(group, reason)), "")
            if reason:
                raise NoConnections(reason)
            data, reports, *others = opened
            names = [f"rank {rank}" for rank in ranks]
            exchange = Exchange(data, reports, group.rank(), names, timeout)
            unless_open.pop_all()
        return cls(exchange, wire, dict(zip(meshes, others, strict=True)))

    def close(self) -> None:
        """End the connections; what is under way is aborted."""
        self.exchange.close()
        for transport in self.meshes.values():
            transport.close()
        self.wire.close()


def _gather(group: dist.ProcessGroup, mine: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    return gathered
