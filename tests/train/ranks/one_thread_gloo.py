"""torch's gloo groups with one thread each, for trainings that gather parameters in the background.

A group's two threads both note the name of the collective that they have ended, without a lock
(torch 2.13, ProcessGroupGloo::runLoop). A name of more than 15 letters, as that of collectives that
are coalesced, is freed twice then: Megatron's --overlap-param-gather dies of it now and then. 64
coalesced gathers at a time, in one process with torch alone, abort within seconds.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroupGloo


class _OneThread(ProcessGroupGloo):
    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, **more: object
    ) -> None:
        options, create = ProcessGroupGloo._Options(), ProcessGroupGloo.create_device
        options._threads, options._timeout = 1, timeout
        for name, value in more.items():  # torch 2.14 has one
            setattr(options, name, value)
        interfaces = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
        options._devices = [create(interface=name) for name in interfaces]
        options._devices = options._devices or [ProcessGroupGloo.create_default_device()]
        super().__init__(store, rank, size, options)


def install() -> None:
    """For the groups that are made from now on."""
    distributed_c10d.ProcessGroupGloo = _OneThread  # type: ignore[misc]
