"""Scenarios of the fake machine without torch: one is named on the line. Rank = device."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

from calls import FLOAT32, NON_BLOCKING, NOT_READY, SUM, Library, communicator, floats, runtime

NAME, SIZE, RANK = sys.argv[1], int(sys.argv[2]), int(os.environ["RANK"])
PEER = 1 - RANK
COUNT = 1000
ONE = (1 << 32 | 1, 1)  # a dim3 of 1 x 1 x 1, in the registers that it is passed in


def stream(cuda: Library) -> int:
    return int(cuda.made("cudaStreamCreateWithFlags", NON_BLOCKING))


def event(cuda: Library) -> int:
    return int(cuda.made("cudaEventCreateWithFlags", 0))


def recorded(cuda: Library, on: int) -> int:
    made = event(cuda)
    cuda.cudaEventRecord(made, on)
    return made


def kernels(cuda: Library, on: int, count: int) -> None:
    for _ in range(count):
        cuda.cudaLaunchKernel(0, *ONE, *ONE, 0, 0, on)


def elapsed(cuda: Library, begin: int, end: int) -> float:
    """Seconds of the fake's own time, which a busy machine does not stretch."""
    return float(cuda.made("cudaEventElapsedTime", begin, end, into=ctypes.c_float)) / 1e3


def queues(cuda: Library) -> Any:
    """A stream waits for an event of another one; a third stream stands behind it in one queue.

    Seconds from the begin of the 200 kernels that the event is behind.
    """
    slow, waits, other = stream(cuda), stream(cuda), stream(cuda)
    begin = recorded(cuda, slow)
    kernels(cuda, slow, 200)
    cuda.cudaStreamWaitEvent(waits, recorded(cuda, slow), 0)
    waited = recorded(cuda, waits)
    kernels(cuda, other, 1)
    behind = recorded(cuda, other)
    over = cuda.cudaEventQuery(waited, allowed=(NOT_READY,))
    cuda.cudaDeviceSynchronize()
    then = cuda.cudaEventQuery(waited)
    found = [elapsed(cuda, begin, one) for one in (waited, behind)]
    return {"waited": found[0], "behind": found[1], "asked": [over, then]}


def copies(cuda: Library) -> Any:
    """Bytes go to the device and back through pinned memory; not before the stream comes to it."""
    size, s = 1 << 20, stream(cuda)
    device = int(cuda.made("cudaMalloc", size))
    source, target = (int(cuda.made("cudaHostAlloc", size, 0)) for _ in range(2))
    ctypes.memset(source, 7, size)
    kernels(cuda, s, 200)
    begin = recorded(cuda, s)
    cuda.cudaMemcpyAsync(device, source, size, 1, s)
    cuda.cudaMemcpyAsync(target, device, size, 2, s)
    end = recorded(cuda, s)
    early = ctypes.string_at(target, 1)[0]
    cuda.cudaStreamSynchronize(s)
    late = ctypes.string_at(target, size) == b"\7" * size
    return {"early": early, "late": late, "took": elapsed(cuda, begin, end)}


def filled(cuda: Library, value: float) -> int:
    at = int(cuda.made("cudaMalloc", 4 * COUNT))
    floats(at, COUNT)[:] = [value] * COUNT
    return at


def connected(cuda: Library, name: str, at: int, s: int) -> int:
    """A communicator whose messages have met: the first ones block the host."""
    comm = communicator(cuda, SIZE, RANK, RANK, name)
    cuda.ncclGroupStart()
    cuda.ncclSend(at, COUNT, FLOAT32, PEER, comm, s)
    cuda.ncclRecv(at, COUNT, FLOAT32, PEER, comm, s)
    cuda.ncclGroupEnd()
    cuda.cudaStreamSynchronize(s)
    return comm


def sends(cuda: Library) -> Any:
    """Rank 1 receives behind 300 kernels; rank 0's host goes on, and its stream waits for that."""
    s = stream(cuda)
    at = filled(cuda, 0.0)
    comm = connected(cuda, NAME, at, s)
    floats(at, COUNT)[:] = [RANK + 1.0] * COUNT
    if RANK:
        kernels(cuda, s, 300)
        cuda.ncclRecv(at, COUNT, FLOAT32, 0, comm, s)
        early, asked, took = floats(at, COUNT)[0], 0, 0.0
    else:
        begin = recorded(cuda, s)
        cuda.ncclSend(at, COUNT, FLOAT32, 1, comm, s)
        end = recorded(cuda, s)
        early, asked = 0.0, cuda.cudaEventQuery(end, allowed=(NOT_READY,))
        cuda.cudaEventSynchronize(end)
        took = elapsed(cuda, begin, end)
    cuda.cudaStreamSynchronize(s)
    late = sorted(set(floats(at, COUNT)[:]))
    cuda.ncclAllReduce(at, at, COUNT, FLOAT32, SUM, comm, s)
    cuda.cudaStreamSynchronize(s)
    all_of = sorted(set(floats(at, COUNT)[:]))
    return {"early": early, "asked": asked, "took": took, "late": late, "sum": all_of}


def early(cuda: Library) -> Any:
    """Planted: a receive is posted before what its peer needs for sending, on another stream."""
    s, compute, there, at = stream(cuda), stream(cuda), stream(cuda), filled(cuda, 0.0)
    comm, back = connected(cuda, NAME, at, s), connected(cuda, NAME + "b", at, s)
    if RANK == 0:
        cuda.ncclRecv(at, COUNT, FLOAT32, 1, comm, s)
        kernels(cuda, compute, 1)
        cuda.cudaStreamWaitEvent(there, recorded(cuda, compute), 0)
        cuda.ncclSend(at, COUNT, FLOAT32, 1, back, there)
    else:
        cuda.ncclRecv(at, COUNT, FLOAT32, 0, back, there)
        cuda.cudaStreamWaitEvent(s, recorded(cuda, there), 0)
        cuda.ncclSend(at, COUNT, FLOAT32, 0, comm, s)
    cuda.cudaDeviceSynchronize()
    return "ended"


if __name__ == "__main__":
    cuda = runtime()
    cuda.cudaSetDevice(RANK)  # of all streams, so that cudaDeviceSynchronize waits for them
    print(json.dumps(globals()[sys.argv[3]](cuda)))
