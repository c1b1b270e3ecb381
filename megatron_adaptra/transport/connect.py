"""Connections of gloo with the fewest threads and descriptors, and of torch's store.

A gloo group as torch makes it has a device of its own (a thread, a port that listens, and four
descriptors) and two threads that serve collectives. For messages alone no such thread is needed,
and groups can share a device: then a connection takes one descriptor.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_adaptra.base import waits
from megatron_adaptra.transport.address import interface_of, named_for_gloo
from megatron_adaptra.transport.descriptors import DEVICE, make_room


def store_connection() -> Any:
    """The job's own store, over another connection: a call that hangs in it delays no other."""
    store = dist.distributed_c10d._get_default_store()
    with contextlib.suppress(RuntimeError):  # some kinds have none
        return store.clone()
    return store


def gather(mine: Any, group: Any = None) -> list[Any]:
    """Return each rank's `mine`, by rank of a `group`, by default of all: a collective of it."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    return gathered


def new_devices() -> list[Any]:
    """Create gloo devices: one per interface in GLOO_SOCKET_IFNAME, else one by the host's name.

    GLOO_DEVICE_TRANSPORT and its certificates count here as in torch's own groups.
    """
    gloo = dist.ProcessGroupGloo
    names = named_for_gloo()
    make_room(DEVICE * max(1, len(names)))
    return [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]


def interfaces() -> str:
    """Return `new_devices`' interfaces, joined by `+`; empty if the host's name is unknown."""
    if names := named_for_gloo():
        return "+".join(names)
    with contextlib.suppress(OSError):
        return interface_of(socket.gethostbyname(socket.gethostname()))
    return ""


def connect(store: Any, me: int, size: int, timeout: float, devices: Sequence[Any] = ()) -> Any:
    """A c10d backend for messages between `size` members, who all call it; `me`: this one.

    `store`: theirs alone. `timeout`: seconds for it. `devices`: to share with others; without them
    it has its own. Raises RuntimeError, which gloo words, if a member does not come.
    """
    options = dist.ProcessGroupGloo._Options()
    options._devices = list(devices) or new_devices()
    options._threads = 0
    options._timeout = timedelta(seconds=timeout)
    return dist.ProcessGroupGloo(store, me, size, options)


def torch_waits(group: Any = None) -> float:
    """Seconds that torch waits for a rank of a `group`, by default the one of all ranks.

    In Megatron's program that is `--distributed-timeout-minutes`; 0 if its backends have none.
    """
    group = group or dist.distributed_c10d._get_default_group()
    theirs = 0.0
    for device in group._device_types:
        with contextlib.suppress(AttributeError, RuntimeError):  # some backends have no options
            theirs = max(theirs, group._get_backend(device).options._timeout.total_seconds())
    return theirs


def patience(seconds: float) -> float:
    """Return the seconds to wait for a rank before the job ends: `seconds`, but no less than torch.

    The time that it takes to find out which rank is missing is added.
    """
    return min(max(seconds, torch_waits()) + waits.CHAIN, waits.FOREVER)


class Pairs:
    """A Pairs serves a FlatAllGather as its group; only some of its members have connections.

    `rank`: this member's. `backends`: by member, a backend of the two, the lower one first.
    """

    def __init__(self, rank: int, backends: Mapping[int, Any]) -> None:
        self._rank, self._backends = rank, dict(backends)

    def rank(self) -> int:
        """This member's number."""
        return self._rank

    def send(self, tensors: list[Any], peer: int, tag: int) -> Any:
        """Send `tensors` to `peer` with `tag`, as a backend does."""
        return self._backends[peer].send(tensors, int(peer > self._rank), tag)

    def recv(self, tensors: list[Any], peer: int, tag: int) -> Any:
        """Receive `tensors` from `peer` with `tag`, as a backend does."""
        return self._backends[peer].recv(tensors, int(peer > self._rank), tag)
