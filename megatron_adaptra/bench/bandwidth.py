"""Bus bandwidth, as nccl-tests defines it (its doc/PERFORMANCE.md).

Unlike bytes by time it does not depend on the number of ranks, so that it can be compared with what
the hardware can do. S is the size of the larger of input and output, t the time, n the ranks:

    send and receive   S / t
    all-reduce         S / t * 2 (n - 1) / n
    all-gather         S / t * (n - 1) / n, where S is what all n ranks have given
"""

from __future__ import annotations

SEND, ALL_REDUCE, ALL_GATHER = "send", "all_reduce", "all_gather"


def busbw(operation: str, nbytes: int, seconds: float, ranks: int = 2) -> float:
    """GB/s of an `operation` over `ranks` that takes `seconds`; `nbytes`: what one rank gives."""
    share = {SEND: 1.0, ALL_REDUCE: 2 * (ranks - 1) / ranks, ALL_GATHER: float(ranks - 1)}
    return share[operation] * nbytes / seconds / 1e9
