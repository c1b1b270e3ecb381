"""Connections between all ranks of a group: of all-reduces by plan, or of a vote."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

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

T = TypeVar("T")


class Opener:
    """Opens transports between the ranks of a group over one `wire`; while `connect` runs.

    `ranks`: global ones, of the group. `key`: of these connections in names. `unless_open`: closes
    what is open if others fail.
    """

    def __init__(
        self, wire: Wire, key: str, ranks: Sequence[int], unless_open: contextlib.ExitStack
    ) -> None:
        self.wire, self.ranks = wire, ranks
        self._key, self._unless_open = key, unless_open
        unless_open.callback(wire.close)

    def mesh(self, name: str) -> Transport:
        """Between all ranks; `name`: of nothing else here."""
        return self._kept(self.wire.mesh(f"{self._key}/{name}", self.ranks))

    def control(self, name: str) -> Transport:
        """Between the first rank and each other one; `name`: of nothing else here."""
        return self._kept(self.wire.control(f"{self._key}/{name}", self.ranks))

    def _kept(self, transport: Transport) -> Transport:
        self._unless_open.callback(transport.close)
        return transport


def connect(
    group: dist.ProcessGroup,
    name: str,
    open_all: Callable[[Opener], T],
    timeout: float,
    transport: str = "auto",
    encrypt: bool = False,
    gather: Callable[[Any], list[Any]] | None = None,
) -> T:
    """What `open_all` makes of connections between all ranks of `group`: a collective of it.

    Args:
        group: of torch.distributed.
        name: of the connections' use, the same on all ranks.
        open_all: opens the same on all ranks, in the same order.
        timeout: seconds that a message of another rank is waited for.
        transport: auto, engine or gloo; auto is gloo where a rank lacks the engine.
        encrypt: over TLS, which the engine has.
        gather: what each rank of the group has given, in order; None where the group itself carries
            objects, as it does not on GPUs without work there.

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
    gather = gather or partial(_gather, group)
    locations, lacks = zip(*gather((ProcessLocation.here(), missing)), strict=True)
    missing = next(filter(None, lacks), "")
    if missing and (encrypt or transport == "engine"):
        field, value = ("encrypt", "on") if encrypt else ("transport", "engine")
        raise BadInput(f"--adaptra-{field}", value, f"not here: {missing}")
    opened: list[T] = []
    reason = ""
    with contextlib.ExitStack() as unless_open:
        try:
            wire: Wire = GlooWire()
            if not missing:
                # A plan counts on it that what is sent first arrives first: on several connections
                # a whole queue of pieces arrives at its end.
                me = dist.get_rank()
                machine = clock_ids(locations)[ranks.index(me)]
                rendezvous = StoreRendezvous(f"adaptra/{key}/engine")
                endpoint = Endpoint(
                    me, local_address(), machine, rendezvous, timeout,
                    encrypted=encrypt, connections=1,
                )  # fmt: skip
                wire = EngineWire(endpoint, me)
            opened.append(open_all(Opener(wire, key, ranks, unless_open)))
        except (PeerLost, OSError, RuntimeError) as error:
            reason = reason_of(error)
        reason = next(filter(None, gather(reason)), "")
        if not opened or reason:
            raise NoConnections(reason)
        unless_open.pop_all()
    return opened[0]


def _gather(group: dist.ProcessGroup, mine: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    return gathered


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

        `group`, `name`, `timeout` (seconds), `transport`, `encrypt`: as for `connect`, whose errors
        come through. `meshes`: names of further transports to open.
        """

        def open_all(opener: Opener) -> Connected:
            data, reports = opener.mesh("data"), opener.mesh("reports")
            others = {one: opener.mesh(one) for one in meshes}
            names = [f"rank {rank}" for rank in opener.ranks]
            exchange = Exchange(data, reports, group.rank(), names, timeout)
            return cls(exchange, opener.wire, others)

        return connect(group, name, open_all, timeout, transport, encrypt)

    def close(self) -> None:
        """End the connections; what is under way is aborted."""
        self.exchange.close()
        for transport in self.meshes.values():
            transport.close()
        self.wire.close()
