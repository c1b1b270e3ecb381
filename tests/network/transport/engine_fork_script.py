"""An engine between two ranks of one process, which forks. Argument: a folder.

The child is refused, ends as an interpreter does, and messages go on.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.folder_rendezvous import FolderRendezvous
from megatron_adaptra.transport.engine.endpoint import Endpoint
from megatron_adaptra.transport.engine.transport import End, EngineTransport

TIMEOUT = 60.0


def exchange(transports: list[EngineTransport], tag: int) -> None:
    got = torch.zeros(1 << 20)
    work = transports[1].irecv(got, 0, tag)
    transports[0].isend(torch.full_like(got, tag), 1, tag)
    work.wait(TIMEOUT)
    assert bool((got == tag).all())


def forks(kind: str, folder: Path) -> None:
    folder.mkdir()
    rendezvous = FolderRendezvous(folder)
    machines = ("here", "here") if kind == "shm" else ("here", "there")
    endpoints = [Endpoint(r, "127.0.0.1", machines[r], rendezvous, TIMEOUT) for r in (0, 1)]
    endpoints[1].connect([0])
    endpoints[0].connect([1])
    transports = [
        EngineTransport(end, "job", {1 - r: End(1 - r, "x")}) for r, end in enumerate(endpoints)
    ]
    exchange(transports, 1)
    child = os.fork()
    if child == 0:
        with pytest.raises(RuntimeError, match=f"is of process {os.getppid()}"):
            transports[0].isend(torch.zeros(4), 1, 2)
        del transports, endpoints
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    exchange(transports, 3)
    for endpoint in endpoints:
        assert not endpoint.records.last
        endpoint.close()
    print(f"done with {kind}")


for kind in ("shm", "tcp"):
    forks(kind, Path(sys.argv[1]) / kind)
