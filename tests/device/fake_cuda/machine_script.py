"""A receive that is posted before its time, on the fake machine, without torch. Rank = device.

Its peer needs another message before it sends, which a stream behind the receive is to send.
"""

from __future__ import annotations

import os
import sys

from calls import FLOAT32, NON_BLOCKING, Library, communicator, floats, runtime

NAME, SIZE, RANK = sys.argv[1], int(sys.argv[2]), int(os.environ["RANK"])
PEER = 1 - RANK
COUNT = 1000
ONE = (1 << 32 | 1, 1)  # a dim3 of 1 x 1 x 1, in the registers that it is passed in


def stream(cuda: Library) -> int:
    return int(cuda.made("cudaStreamCreateWithFlags", NON_BLOCKING))


def recorded(cuda: Library, on: int) -> int:
    made = int(cuda.made("cudaEventCreateWithFlags", 0))
    cuda.cudaEventRecord(made, on)
    return made


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


def early(cuda: Library) -> None:
    s, compute, there, at = stream(cuda), stream(cuda), stream(cuda), filled(cuda, 0.0)
    comm, back = connected(cuda, NAME, at, s), connected(cuda, NAME + "b", at, s)
    if RANK == 0:
        cuda.ncclRecv(at, COUNT, FLOAT32, 1, comm, s)
        cuda.cudaLaunchKernel(0, *ONE, *ONE, 0, 0, compute)
        cuda.cudaStreamWaitEvent(there, recorded(cuda, compute), 0)
        cuda.ncclSend(at, COUNT, FLOAT32, 1, back, there)
    else:
        cuda.ncclRecv(at, COUNT, FLOAT32, 0, back, there)
        cuda.cudaStreamWaitEvent(s, recorded(cuda, there), 0)
        cuda.ncclSend(at, COUNT, FLOAT32, 0, comm, s)
    cuda.cudaDeviceSynchronize()


if __name__ == "__main__":
    cuda = runtime()
    cuda.cudaSetDevice(RANK)  # of all streams, so that cudaDeviceSynchronize waits for them
    early(cuda)
    print('"ended"')
