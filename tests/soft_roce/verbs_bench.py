"""`adaptra bench p2p`, one process per rank, without its launcher: that would import torch again.

verbs_bench.py BYTES: prints the rows.
"""

from __future__ import annotations

import os
import sys

from megatron_adaptra.bench import worker
from megatron_adaptra.bench.options import P2P, Options


def main(nbytes: int) -> int:
    os.environ.update(
        GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", WORLD_SIZE="2"
    )
    child = os.fork()
    os.environ["RANK"] = str(int(child == 0))
    status = worker.main(Options(P2P, (nbytes,), rounds=1).dump())
    return status if child == 0 else status or os.waitpid(child, 0)[1]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
