"""Scenarios of two hosts that share device 0, without torch: one is named on the line."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any

from calls import (
    FLOAT32,
    NON_BLOCKING,
    SUM,
    UINT8,
    Library,
    communicator,
    error_of,
    floats,
    runtime,
)

NAME, RANK = sys.argv[1], int(os.environ["RANK"])
PEER = 1 - RANK
ROUNDS = 8  # messages in flight at once
COUNT = 1000
PATIENCE = 60.0  # seconds
LOOK = 1e-3  # seconds between two looks for an error


def contents(size: int, rank: int) -> bytes:
    part = bytes((rank + 7 * i) % 251 for i in range(1009))
    return (part * (size // len(part) + 1))[:size]


class Host:
    """A host sends to the other one and receives, on one stream."""

    def __init__(self, cuda: Library) -> None:
        self.cuda = cuda
        self.comm = communicator(cuda, 2, RANK, 0, NAME)
        self.stream = int(cuda.made("cudaStreamCreateWithFlags", NON_BLOCKING))

    def room(self, size: int) -> int:
        return int(self.cuda.made("cudaMalloc", size))

    def send(self, at: int, size: int) -> None:
        self.cuda.ncclSend(at, size, UINT8, PEER, self.comm, self.stream)

    def receive(self, at: int, size: int) -> None:
        self.cuda.ncclRecv(at, size, UINT8, PEER, self.comm, self.stream)

    def synchronize(self) -> None:
        self.cuda.cudaStreamSynchronize(self.stream)

    def exchange(self, sizes: list[int]) -> tuple[int, int, bool]:
        """Send one message of each size and receive another, all at once.

        The moments before and after (nanoseconds), and whether the bytes are right.
        """
        out, into = ([self.room(size + 1) for size in sizes] for _ in range(2))
        for at, size in zip(out, sizes, strict=True):
            ctypes.memmove(at, contents(size, RANK), size)
        begin = time.monotonic_ns()
        self.cuda.ncclGroupStart()
        for theirs, ours, size in zip(into, out, sizes, strict=True):
            self.send(ours, size)
            self.receive(theirs, size)
        self.cuda.ncclGroupEnd()
        self.synchronize()
        end = time.monotonic_ns()
        right = all(
            ctypes.string_at(at, size) == contents(size, PEER)
            for at, size in zip(into, sizes, strict=True)
        )
        for at in out + into:
            self.cuda.cudaFree(at)
        return begin, end, right

    def sum(self) -> list[float]:
        at = self.room(4 * COUNT)
        floats(at, COUNT)[:] = [RANK + 1.0] * COUNT
        self.cuda.ncclAllReduce(at, at, COUNT, FLOAT32, SUM, self.comm, self.stream)
        self.synchronize()
        return sorted(set(floats(at, COUNT)[:]))

    def lost(self) -> int:
        """The communicator's error, once it has one; then it is aborted."""
        deadline = time.monotonic() + PATIENCE
        error = ctypes.c_int()
        while not error.value:
            assert time.monotonic() < deadline, "no error"
            time.sleep(LOOK)
            self.cuda.ncclCommGetAsyncError(self.comm, ctypes.byref(error))
        self.cuda.ncclCommAbort(self.comm)
        self.synchronize()
        return error.value


def messages(cuda: Library) -> Any:
    """Several messages at once; some of the sizes on the line, one after the other; a sum."""
    host = Host(cuda)
    host.exchange([0])  # connects, and ends for both at about the same time
    together = host.exchange([4096 + i for i in range(ROUNDS)])
    alone = [host.exchange([int(size)]) for size in sys.argv[4:]]
    found = {"alone": alone, "together": together, "sum": host.sum()}
    cuda.ncclCommDestroy(host.comm)
    return found


def same(cuda: Library) -> Any:
    """The error of ranks whose hosts and devices are the same."""
    return error_of(communicator, cuda, 2, RANK, 0, NAME)


def ends(cuda: Library) -> Any:
    """Rank 1 ends before it sends what rank 0 waits for."""
    host = Host(cuda)
    host.exchange([0])
    if RANK:
        return 0
    host.receive(host.room(1), 1)
    return host.lost()


def ends_under_way(cuda: Library) -> Any:
    """Rank 1 ends while what rank 0 has sent is on its way."""
    host = Host(cuda)
    host.exchange([0])
    at = host.room(1)
    if RANK:
        host.receive(at, 1)
        time.sleep(float(sys.argv[4]))
        return 0
    host.send(at, 1)
    return host.lost()


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[3]](runtime())), flush=True)
    os._exit(0)  # a rank that leaves early takes its sockets along, whatever is under way
