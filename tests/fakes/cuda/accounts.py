"""What a run over the fake CUDA holds and has called, read while it runs: memory, calls, stalls.

The fake writes a file per rank into the folder given by `--accounts` (libraries/accounts.cpp).
"""

from __future__ import annotations

import struct
from pathlib import Path

HEADING = 1024  # bytes of names, before the numbers


def of_rank(folder: Path, rank: int) -> dict[str, int]:
    """Name -> number now: `device_bytes`, `device_peak`, `pinned_bytes`, `pinned_peak`, `calls`,
    `nccl_calls`, `launches`, `kernels`, `host_wait_us`, `stalls`, `events`, `marks`.
    """
    data = (folder / f"rank-{rank}.accounts").read_bytes()
    names = data[:HEADING].rstrip(b"\0").decode().split()
    numbers = struct.unpack_from(f"<{len(names)}q", data, HEADING)
    return dict(zip(names, numbers, strict=True))
