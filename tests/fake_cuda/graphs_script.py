"""Scenarios of graphs, by the runtime: one is named on the line."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

from calls import (
    FLOAT32,
    NON_BLOCKING,
    SUM,
    CallFailed,
    Library,
    communicator,
    floats,
    runtime,
)

ONE = (1 << 32 | 1, 1)  # a dim3 of 1 x 1 x 1, in the registers that it is passed in


def error_of(call: Any, *words: Any) -> int:
    try:
        call(*words)
    except CallFailed as failed:
        return failed.error
    return 0


def stream(cuda: Library) -> int:
    return int(cuda.made("cudaStreamCreateWithFlags", NON_BLOCKING))


def event(cuda: Library) -> int:
    return int(cuda.made("cudaEventCreateWithFlags", 0))


def kernels(cuda: Library, on: int, count: int) -> None:
    for _ in range(count):
        cuda.cudaLaunchKernel(0, *ONE, *ONE, 0, 0, on)


def captured(cuda: Library, on: int, what: Any) -> int:
    """An executable graph of what is launched meanwhile."""
    cuda.cudaStreamBeginCapture(on, 0)
    what()
    graph = ctypes.c_uint64()
    cuda.cudaStreamEndCapture(on, ctypes.byref(graph))
    return int(cuda.made("cudaGraphInstantiateWithFlags", graph.value, 0))


def elapsed(cuda: Library, begin: int, end: int) -> float:
    return float(cuda.made("cudaEventElapsedTime", begin, end, into=ctypes.c_float)) / 1e3


def replayed(cuda: Library) -> Any:
    """Nothing runs while it is captured; a replay takes the time of all, of both streams."""
    a, b, memory = stream(cuda), stream(cuda), cuda.made("cudaMalloc", 100)
    there, back, begin, middle, end = (event(cuda) for _ in range(5))

    def work() -> None:
        kernels(cuda, a, 50)
        cuda.cudaEventRecord(there, a)
        cuda.cudaStreamWaitEvent(b, there, 0)  # from here on b belongs to the capture
        kernels(cuda, b, 50)
        cuda.cudaMemsetAsync(memory, 9, 100, b)
        cuda.cudaEventRecord(back, b)
        cuda.cudaStreamWaitEvent(a, back, 0)

    cuda.cudaEventRecord(begin, a)
    graph = captured(cuda, a, work)
    cuda.cudaEventRecord(middle, a)
    before = ctypes.string_at(memory, 1)[0]
    for _ in range(2):
        cuda.cudaGraphLaunch(graph, a)
    cuda.cudaEventRecord(end, a)
    cuda.cudaEventSynchronize(end)
    return {
        "capture": elapsed(cuda, begin, middle), "before": before,
        "replays": elapsed(cuda, middle, end), "after": ctypes.string_at(memory, 100)[99],
    }  # fmt: skip


def refused(cuda: Library) -> Any:
    """What a capture does not stand."""
    a, b, early, inside = stream(cuda), stream(cuda), event(cuda), event(cuda)
    cuda.cudaEventRecord(early, b)
    found: dict[str, int] = {"default stream": error_of(cuda.cudaStreamBeginCapture, 0, 0)}
    cuda.cudaStreamBeginCapture(a, 0)
    cuda.cudaEventRecord(inside, a)
    found["stream"] = error_of(cuda.cudaStreamSynchronize, a)
    found["device"] = error_of(cuda.cudaDeviceSynchronize)
    found["event"] = error_of(cuda.cudaEventQuery, inside)
    found["from outside"] = error_of(cuda.cudaStreamWaitEvent, a, early, 0)
    cuda.cudaStreamWaitEvent(b, inside, 0)
    kernels(cuda, b, 1)
    graph = ctypes.c_uint64()
    found["not joined"] = error_of(cuda.cudaStreamEndCapture, a, ctypes.byref(graph))
    found["no capture"] = error_of(cuda.cudaStreamEndCapture, a, ctypes.byref(graph))
    found["afterwards"] = error_of(cuda.cudaDeviceSynchronize)
    return found


def messages(cuda: Library) -> Any:
    """NCCL in a graph: each replay sends anew."""
    rank, size = int(os.environ["RANK"]), int(sys.argv[2])
    comm, s = communicator(cuda, size, rank, rank, sys.argv[1]), stream(cuda)
    at = int(cuda.made("cudaMalloc", 400))
    floats(at, 100)[:] = [rank + 1.0] * 100
    cuda.ncclAllReduce(at, at, 1, FLOAT32, SUM, comm, s)  # connects
    graph = captured(cuda, s, lambda: cuda.ncclAllReduce(at, at, 100, FLOAT32, SUM, comm, s))
    unchanged = floats(at, 100)[99]
    for _ in range(3):
        cuda.cudaGraphLaunch(graph, s)
    cuda.cudaStreamSynchronize(s)
    cuda.ncclCommDestroy(comm)
    return [unchanged, floats(at, 100)[99]]


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[3]](runtime())))
