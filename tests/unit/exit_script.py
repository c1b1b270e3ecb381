"""Two ranks that leave their transports open; rank 0's interpreter ends while its peer goes.

Arguments: a wire's name; a named pipe, which shows rank 1 that rank 0 ends.
"""

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from megatron_adaptra.transport.engine.endpoint import Endpoint
from megatron_adaptra.transport.engine.engine_wire import EngineWire, StoreRendezvous
from megatron_adaptra.transport.wire import GlooWire, Wire

dist.init_process_group("gloo")
rank, (kind, pipe) = dist.get_rank(), sys.argv[1:]
if kind == "gloo":
    wire: Wire = GlooWire()
else:
    wire = EngineWire(Endpoint(rank, "127.0.0.1", "here", StoreRendezvous("engine"), 60), rank)
transport = wire.transport("left open", [0, 1], [(0, 1), (1, 0)])
work = transport.irecv(torch.zeros(8), 1 - rank, 1)
dist.barrier()
if rank == 1:
    os.read(os.open(pipe, os.O_RDONLY), 1)  # until rank 0 has opened and closed it
    os._exit(0)


class Last:
    """What the interpreter frees at its end: by then the peer goes, and receives end."""

    def __del__(
        self, write: Any = os.write, open: Any = os.open, close: Any = os.close, path: str = pipe,
        sleep: Any = time.sleep, flags: int = os.O_WRONLY,
    ) -> None:  # fmt: skip
        write(1, b"ending\n")
        close(open(path, flags))
        sleep(0.5)


sys.modules["last"] = Last()  # type: ignore[assignment]
