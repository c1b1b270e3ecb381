"""What goes wrong in a rehearsal, by name; for scripts that train, on CPUs and over fake GPUs."""

from __future__ import annotations

import inspect
import linecache
import os
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules

from megatron_adaptra.base import waits
from megatron_adaptra.transport.engine.on_device import DeviceTransport
from megatron_adaptra.transport.engine.transport import EngineTransport

SECONDS = 1.0  # that are waited for a message which does not come


def order() -> None:
    """A fork on all ranks, which calls nothing at the last stage where there is nothing to send."""
    function = schedules.forward_backward_pipelining_without_interleaving
    call = "p2p_communicator.send_forward_recv_backward("
    last = "p2p_communicator.pp_group.rank() == p2p_communicator.pp_group.size() - 1"
    source = inspect.getsource(function)
    assert source.count(call) == 1
    source = source.replace(call, f"None if {last} else {call}")
    linecache.cache["fork.py"] = len(source), None, source.splitlines(True), "fork.py"
    exec(compile(source, "fork.py", "exec"), vars(schedules))


def wrong_bytes() -> None:
    """All that rank 1 receives by us has other bytes than were sent."""
    if os.environ["RANK"] != "1":
        return
    for kind in (DeviceTransport, EngineTransport):

        def irecv(
            self: Any, buffer: torch.Tensor, *args: Any, original: Any = kind.irecv, **kwargs: Any
        ) -> Any:
            work = original(self, buffer, *args, **kwargs)
            wait = work.wait

            def damaged(timeout: float) -> Any:
                stamps = wait(timeout)
                if buffer.dim() == 3:  # a message between stages
                    buffer.detach().copy_(torch.full(buffer.shape, torch.nan))
                return stamps

            work.wait = damaged
            return work

        kind.irecv = irecv  # type: ignore[method-assign]


def no_path() -> None:
    """As a slow link, which is given for it: nothing arrives while it is waited for."""
    waits.REHEARSAL = SECONDS


FAULTS = {"": lambda: None, "order": order, "bytes": wrong_bytes, "path": no_path}
