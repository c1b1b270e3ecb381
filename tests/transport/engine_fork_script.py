"""An engine between two ranks of one process, which forks. Argument: what ranks' machine is.

The child is refused, ends as an interpreter does, and messages go on.
"""

import os
import sys

import torch

from megatron_adaptra.transport.engine.endpoint import Endpoint
from megatron_adaptra.transport.engine.transport import End, EngineTransport

TIMEOUT = 60.0


class Words(dict[str, str]):
    """A board for one process."""

    def put(self, key: str, text: str) -> bool:
        self[key] = text
        return True

    def put_first(self, key: str, text: str) -> None:
        self.setdefault(key, text)


def exchange(transports: list[EngineTransport], tag: int) -> None:
    got = torch.zeros(1 << 20)
    work = transports[1].irecv(got, 0, tag)
    transports[0].isend(torch.full_like(got, tag), 1, tag)
    work.wait(TIMEOUT)
    assert bool((got == tag).all())


board = Words()
machines = ("here", "here") if sys.argv[1] == "shm" else ("here", "there")
endpoints = [Endpoint(r, "127.0.0.1", machines[r], board, TIMEOUT) for r in (0, 1)]
endpoints[1].connect([0])
endpoints[0].connect([1])
transports = [EngineTransport(e, "job", {1 - r: End(1 - r, "x")}) for r, e in enumerate(endpoints)]
exchange(transports, 1)
child = os.fork()
if child == 0:
    try:
        transports[0].isend(torch.zeros(4), 1, 2)
    except RuntimeError as error:
        assert f"is of process {os.getppid()}" in str(error)
        del transports, endpoints
        sys.exit(7)
    sys.exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
exchange(transports, 3)
assert not endpoints[0].records and not endpoints[1].records
for endpoint in endpoints:
    endpoint.close()
print("done")
