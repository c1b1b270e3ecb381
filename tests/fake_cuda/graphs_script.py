"""Scenarios of graphs, by the runtime: one is named on the line."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from calls import (
    FLOAT32,
    NON_BLOCKING,
    SUM,
    Library,
    communicator,
    error_of,
    floats,
    runtime,
)

GLOBAL, THREAD_LOCAL, RELAXED = range(3)  # modes of captures and threads
PATIENCE = 60.0  # seconds
ONE = (1 << 32 | 1, 1)  # a dim3 of 1 x 1 x 1, in the registers that it is passed in


def stream(cuda: Library) -> int:
    return int(cuda.made("cudaStreamCreateWithFlags", NON_BLOCKING))


def event(cuda: Library) -> int:
    return int(cuda.made("cudaEventCreateWithFlags", 0))


def kernels(cuda: Library, on: int, count: int) -> None:
    for _ in range(count):
        cuda.cudaLaunchKernel(0, *ONE, *ONE, 0, 0, on)


def end(cuda: Library, on: int) -> int:
    """The graph that was captured on a stream."""
    graph = ctypes.c_uint64()
    cuda.cudaStreamEndCapture(on, ctypes.byref(graph))
    return int(graph.value)


def captured(cuda: Library, on: int, what: Any) -> int:
    """An executable graph of what is launched meanwhile."""
    cuda.cudaStreamBeginCapture(on, 0)
    what()
    graph = end(cuda, on)
    return int(cuda.made("cudaGraphInstantiateWithFlags", graph, 0))


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
    """What a capture does not stand: each error, and that of the end of the capture it was in."""
    a, b, early, inside = stream(cuda), stream(cuda), event(cuda), event(cuda)
    cuda.cudaEventRecord(early, b)
    found: dict[str, Any] = {"default stream": error_of(cuda.cudaStreamBeginCapture, 0, 0)}
    for name, call in {
        "stream": lambda: cuda.cudaStreamSynchronize(a),
        "device": cuda.cudaDeviceSynchronize,
        "event": lambda: cuda.cudaEventQuery(inside),
        "from outside": lambda: cuda.cudaStreamWaitEvent(a, early, 0),
        "nothing": lambda: None,
    }.items():
        cuda.cudaStreamBeginCapture(a, 0)
        cuda.cudaEventRecord(inside, a)
        found[name] = error_of(call), error_of(end, cuda, a)
    cuda.cudaStreamBeginCapture(a, 0)
    cuda.cudaEventRecord(inside, a)
    cuda.cudaStreamWaitEvent(b, inside, 0)
    kernels(cuda, b, 1)
    found["not joined"] = error_of(end, cuda, a)
    found["no capture"] = error_of(end, cuda, a)
    found["afterwards"] = error_of(cuda.cudaDeviceSynchronize)
    return found


def modes(cuda: Library) -> Any:
    """An event is asked for and memory pinned while a capture is under way.

    By the capture's mode, the asking thread's mode, and whether that is another thread: the errors
    of both calls, and of the capture's end.
    """
    a, done, memory = stream(cuda), event(cuda), ctypes.c_uint64()
    cuda.cudaEventRecord(done, 0)
    cuda.cudaEventSynchronize(done)
    found = {}

    def ask(mode: int) -> list[int]:
        before = ctypes.c_int(mode)
        cuda.cudaThreadExchangeStreamCaptureMode(ctypes.byref(before))
        assert before.value == GLOBAL
        pinned = error_of(cuda.cudaHostAlloc, ctypes.byref(memory), 1, 0)
        errors = [error_of(cuda.cudaEventQuery, done), pinned]
        cuda.cudaThreadExchangeStreamCaptureMode(ctypes.byref(before))
        assert before.value == mode
        return errors

    for capture in (GLOBAL, THREAD_LOCAL, RELAXED):
        for mode in (GLOBAL, THREAD_LOCAL, RELAXED):
            for where in ("another", "own"):
                cuda.cudaStreamBeginCapture(a, capture)
                if where == "own":
                    errors = ask(mode)
                else:
                    with ThreadPoolExecutor(1) as pool:
                        errors = pool.submit(ask, mode).result(PATIENCE)
                found[f"{capture}{mode} {where}"] = [*errors, error_of(end, cuda, a)]
    cuda.cudaStreamBeginCapture(a, GLOBAL)
    with ThreadPoolExecutor(1) as pool:
        found["end"] = pool.submit(error_of, end, cuda, a).result(PATIENCE)
    end(cuda, a)
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
