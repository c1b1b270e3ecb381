"""torch's gloo groups with one device for all of a process, and one thread each.

torch gives each group a device with a thread that wakes up a hundred times a second. A training has
some forty groups, and several ranks on few cores: a third of the CPU time of tests went there.

A group's two threads both note the name of the collective that they have ended, without a lock
(torch 2.13, ProcessGroupGloo::runLoop). A name of more than 15 letters, as that of collectives that
are coalesced, is freed twice then: Megatron's --overlap-param-gather dies of it now and then. 64
coalesced gathers at a time, in one process with torch alone, abort within seconds.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroupGloo


@functools.cache
def _devices(_: int, interfaces: str) -> list[Any]:
    """Return gloo devices on `interfaces`, separated by commas, for the process of this number."""
    create = ProcessGroupGloo.create_device
    devices = [create(interface=name) for name in filter(None, interfaces.split(","))]
    return devices or [ProcessGroupGloo.create_default_device()]


class _OneDevice(ProcessGroupGloo):
    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, **more: object
    ) -> None:
        options = ProcessGroupGloo._Options()
        options._threads, options._timeout = 1, timeout
        for name, value in more.items():  # torch 2.14 has one
            setattr(options, name, value)
        options._devices = _devices(os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME", ""))
        super().__init__(store, rank, size, options)


def install() -> None:
    """For the groups that are made from now on."""
    distributed_c10d.ProcessGroupGloo = _OneDevice  # type: ignore[misc]
