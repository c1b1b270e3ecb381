"""Two ranks that leave their transports open; rank 0's interpreter ends while its peer goes.

Arguments: the rank, the port of a store, a wire's name.
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

rank, store = int(sys.argv[1]), dist.TCPStore("127.0.0.1", int(sys.argv[2]), None, False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
if sys.argv[3] == "gloo":
    wire: Wire = GlooWire()
else:
    wire = EngineWire(Endpoint(rank, "127.0.0.1", "here", StoreRendezvous("engine"), 60), rank)
transport = wire.transport("left open", [0, 1], [(0, 1), (1, 0)])
work = transport.irecv(torch.zeros(8), 1 - rank, 1)
dist.barrier()
if rank == 1:
    sys.stdin.readline()
    os._exit(0)


class Last:
    """What the interpreter frees at its end: by then the peer goes, and receives end."""

    def __del__(self, write: Any = os.write, sleep: Any = time.sleep) -> None:
        write(1, b"ending\n")
        sleep(0.5)


sys.modules["last"] = Last()  # type: ignore[assignment]
