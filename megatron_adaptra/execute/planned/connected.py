"""Connections between all ranks of a group, for all-reduces by plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megatron_adaptra.execute.planned.exchange import Exchange
from megatron_adaptra.execute.process_location import ProcessLocation, clock_ids
from megatron_adaptra.transport.base import Transport
from megatron_adaptra.transport.connect import gather
from megatron_adaptra.transport.opened import open_wire
from megatron_adaptra.transport.wire import Wire

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
        machine = clock_ids(gather(ProcessLocation.here(), group))[group.rank()]

        def agree(reason: str, waited: bool) -> str:
            return next(filter(None, gather(reason, group)), "")

        def opens(wire: Wire) -> Iterator[Transport]:
            return (wire.mesh(f"{key}/{mesh}", ranks) for mesh in ("data", "reports", *meshes))

        # A plan counts on it that what is sent first arrives first: on several connections a whole
        # queue of pieces arrives at its end.
        wire, (data, reports, *others) = open_wire(
            key, machine, timeout, agree, opens, asked=transport, encrypt=encrypt, connections=1
        )
        names = [f"rank {rank}" for rank in ranks]
        exchange = Exchange(data, reports, group.rank(), names, timeout)
        return cls(exchange, wire, dict(zip(meshes, others, strict=True)))

    def close(self) -> None:
        """End the connections; what is under way is aborted."""
        self.exchange.close()
        for transport in self.meshes.values():
            transport.close()
        self.wire.close()
