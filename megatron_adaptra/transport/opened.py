"""The one place that opens a wire: of our engine, or of gloo where a rank lacks the engine.

A process opens one for each use: one for pipelines and small collectives, and one for each group of
reductions by plan, with a single connection to a peer, so that messages arrive in the order of
their sends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

import torch.distributed as dist

from megatron_adaptra.base.errors import BadInput, DeviceFailed, NoConnections, PeerLost, reason_of
from megatron_adaptra.transport.address import local_address
from megatron_adaptra.transport.base import Transport
from megatron_adaptra.transport.engine import bindings
from megatron_adaptra.transport.engine.endpoint import CONNECTIONS, Endpoint
from megatron_adaptra.transport.engine.engine_wire import EngineWire, StoreRendezvous
from megatron_adaptra.transport.wire import GlooWire, Wire


def missing_engine(asked: str, encrypt: bool) -> str:
    """Return why the engine does not serve here, or an empty string.

    `asked`, `encrypt`: as for `open_wire`.
    """
    if asked == "gloo":
        return "gloo was asked for"
    return bindings.missing_tls() if encrypt else bindings.missing()


def open_wire(
    key: str,
    machine: str,
    timeout: float,
    agree: Callable[[str, bool], str],
    opens: Callable[[Wire], Iterable[Transport]],
    *,
    asked: str = "auto",
    encrypt: bool = False,
    over_gloo: Callable[[str], None] = lambda missing: None,
    connections: int = CONNECTIONS,
    gpu: Callable[[], str] = str,
    log: Path | None = None,
    copies: bool = False,
) -> tuple[Wire, list[Transport]]:
    """Open a wire and the transports that `opens` makes over it, with all ranks that `agree`.

    `key`: of this use, the same on all its ranks, and of nothing else. `agree` takes this rank's
    reason not to go on, or an empty text, and whether that is another rank that did not come; it
    returns one rank's reason, the same on all. `asked`: auto, engine or gloo; auto is gloo where a
    rank lacks the engine. `encrypt`: over TLS, which the engine has. `over_gloo` is called with the
    reason for gloo. `machine`, `timeout`, `connections`, `log`: as for Endpoint, as is what `gpu`
    returns; `copies`: as for EngineWire.

    Raises BadInput if what was asked for by name is not there, NoConnections, on all ranks for the
    same reason, if some rank cannot connect.
    """
    missing = agree(missing_engine(asked, encrypt), False)
    if missing and (encrypt or asked == "engine"):
        field, value = ("encrypt", "on") if encrypt else ("transport", asked)
        raise BadInput(f"--adaptra-{field}", value, f"not here: {missing}")
    if missing:
        over_gloo(missing)
    opened: list[Transport] = []
    why, late = "", False
    with contextlib.ExitStack() as unless_open:
        try:
            if missing:
                wire: Wire = GlooWire()
            else:
                me, rendezvous = dist.get_rank(), StoreRendezvous(f"adaptra/{key}/engine")
                near = gpu()
                endpoint = Endpoint(
                    me, local_address(gpu=bool(near)), machine, rendezvous, timeout, log,
                    encrypted=encrypt, gpu=near, connections=connections,
                )  # fmt: skip
                wire = EngineWire(endpoint, me, copies)
            unless_open.callback(wire.close)
            for transport in opens(wire):
                unless_open.callback(transport.close)
                opened.append(transport)
        except (PeerLost, DeviceFailed, OSError, RuntimeError) as error:
            why, late = reason_of(error), isinstance(error, PeerLost)
        if reason := agree(why, late):
            raise NoConnections(f"cannot connect: {reason}")
        unless_open.pop_all()
        return wire, opened
