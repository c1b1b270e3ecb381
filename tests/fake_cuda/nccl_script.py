"""Scenarios of NCCL between processes without torch: one is named on the line. Rank = device."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from calls import FLOAT32, NON_BLOCKING, SUM, Library, communicator, error_of, floats, runtime

NAME, SIZE, RANK = sys.argv[1], int(sys.argv[2]), int(os.environ["RANK"])
NEXT, PREVIOUS = (RANK + 1) % SIZE, (RANK - 1) % SIZE
COUNT = 1000
MAX, MIN, AVERAGE, BFLOAT16, INT64 = 2, 3, 4, 9, 4


def memory(cuda: Library, count: int = COUNT) -> int:
    return int(cuda.made("cudaMalloc", 8 * count))


def stream(cuda: Library) -> int:
    return int(cuda.made("cudaStreamCreateWithFlags", NON_BLOCKING))


def event(cuda: Library) -> int:
    return int(cuda.made("cudaEventCreateWithFlags", 0))


def filled(cuda: Library, value: float, count: int = COUNT) -> int:
    at = memory(cuda, count)
    floats(at, count)[:] = [value] * count
    return at


def values(at: int, count: int = COUNT) -> list[float]:
    return sorted(set(floats(at, count)[:]))


def results(cuda: Library) -> Any:
    """Every operation, with values that show who has added what."""
    comm, s = communicator(cuda, SIZE, RANK, RANK, NAME), stream(cuda)
    found: dict[str, Any] = {}
    own, out = filled(cuda, RANK + 1.0), memory(cuda, SIZE * COUNT)
    for name, op in (("sum", SUM), ("max", MAX), ("min", MIN), ("average", AVERAGE)):
        cuda.ncclAllReduce(own, out, COUNT, FLOAT32, op, comm, s)
        cuda.cudaStreamSynchronize(s)
        found[name] = values(out)
    cuda.ncclAllReduce(own, own, 1, FLOAT32, SUM, comm, s)  # in place, less values than ranks
    cuda.cudaStreamSynchronize(s)
    found["one value in place"] = floats(own, 2)[:]
    cuda.ncclAllGather(filled(cuda, float(RANK)), out, COUNT, FLOAT32, comm, s)
    cuda.cudaStreamSynchronize(s)
    found["gather"] = [values(out + 4 * COUNT * p) for p in range(SIZE)]
    parts = memory(cuda, SIZE * COUNT)
    floats(parts, SIZE * COUNT)[:] = [float(10 ** (i // COUNT)) for i in range(SIZE * COUNT)]
    cuda.ncclReduceScatter(parts, out, COUNT, FLOAT32, SUM, comm, s)
    cuda.cudaStreamSynchronize(s)
    found["scatter"] = values(out)
    given = filled(cuda, RANK + 5.0)
    cuda.ncclBroadcast(given, out, COUNT, FLOAT32, 1, comm, s)
    cuda.cudaStreamSynchronize(s)
    found["broadcast"] = values(out)
    floats(out, COUNT)[:] = [0.0] * COUNT
    cuda.ncclReduce(given, out, COUNT, FLOAT32, SUM, 1, comm, s)
    cuda.cudaStreamSynchronize(s)
    found["reduce"] = values(out)
    cuda.ncclGroupStart()
    cuda.ncclSend(given, COUNT, FLOAT32, NEXT, comm, s)
    cuda.ncclRecv(out, COUNT, FLOAT32, PREVIOUS, comm, s)
    cuda.ncclGroupEnd()
    cuda.cudaStreamSynchronize(s)
    found["ring"] = values(out)
    half = memory(cuda)
    (ctypes.c_uint16 * COUNT).from_address(half)[:] = [0x3F80] * COUNT  # 1 in bfloat16
    cuda.ncclAllReduce(half, half, COUNT, BFLOAT16, SUM, comm, s)
    whole = memory(cuda)
    (ctypes.c_int64 * COUNT).from_address(whole)[:] = [1 << 40] * COUNT
    cuda.ncclAllReduce(whole, whole, COUNT, INT64, SUM, comm, s)
    cuda.cudaStreamSynchronize(s)
    found["bfloat16"] = sorted(set((ctypes.c_uint16 * COUNT).from_address(half)[:]))
    found["int64"] = sorted(set((ctypes.c_int64 * COUNT).from_address(whole)[:]))
    # The odd and the even ranks, in reverse.
    part = split(cuda, comm, RANK % 2, -RANK)
    cuda.ncclAllGather(filled(cuda, float(RANK)), out, COUNT, FLOAT32, part, s)
    cuda.cudaStreamSynchronize(s)
    found["split"] = [values(out + 4 * COUNT * p)[0] for p in range(SIZE // 2)]
    for c in (part, comm):
        cuda.ncclCommDestroy(c)
    return found


def split(cuda: Library, comm: int, color: int, key: int) -> int:
    made = ctypes.c_uint64()
    cuda.ncclCommSplit(comm, ctypes.c_int(color), ctypes.c_int(key), ctypes.byref(made), 0)
    return made.value


def asynchronous(cuda: Library) -> Any:
    """Rank 1 receives late; rank 0's host runs ahead, and its stream waits for the receive."""
    comm, s = communicator(cuda, SIZE, RANK, RANK, NAME), stream(cuda)
    at = filled(cuda, RANK + 1.0)
    exchange(cuda, comm, s, at, memory(cuda))  # connects
    cuda.cudaStreamSynchronize(s)
    before = time.monotonic()
    if RANK == 0:
        begin, end = event(cuda), event(cuda)
        cuda.cudaEventRecord(begin, s)
        cuda.ncclSend(at, COUNT, FLOAT32, 1, comm, s)
        cuda.cudaEventRecord(end, s)
        launched = time.monotonic() - before
        cuda.cudaEventSynchronize(end)
        return {"launched": launched, "took": elapsed_of(cuda, begin, end)}
    for _ in range(500):  # half a second of kernels come first
        cuda.cudaLaunchKernel(0, *([1 << 32 | 1, 1] * 2), 0, 0, s)
    cuda.ncclRecv(at, COUNT, FLOAT32, 0, comm, s)
    early = values(at)
    cuda.cudaStreamSynchronize(s)
    return {"early": early, "late": values(at)}


def eager(cuda: Library) -> Any:
    """Small sends are over before their receives are posted; a larger one is not."""
    comm, s = communicator(cuda, SIZE, RANK, RANK, NAME), stream(cuda)
    own, out, large = filled(cuda, RANK + 1.0), memory(cuda), 2 * COUNT
    exchange(cuda, comm, s, own, out)  # connects
    cuda.cudaStreamSynchronize(s)
    found = []
    for turn in range(3):
        small, whole = [[10.0 * turn + n for n in range(3)], [10.0 * turn + 5]]
        if RANK == 0:
            for value in small:
                cuda.ncclSend(filled(cuda, value), COUNT, FLOAT32, 1, comm, s)
            cuda.cudaStreamSynchronize(s)
        split(cuda, comm, -1, 0)  # all come together, by sockets of the hosts
        if RANK == 0:
            cuda.ncclSend(filled(cuda, whole[0], large), large, FLOAT32, 1, comm, s)
            over = cuda.cudaStreamQuery(s, allowed=(600,))
            split(cuda, comm, -1, 0)
            got = [over]
        else:
            into = [memory(cuda) for _ in small] + [memory(cuda, large)]
            split(cuda, comm, -1, 0)
            for at in into[:-1]:
                cuda.ncclRecv(at, COUNT, FLOAT32, 0, comm, s)
            cuda.ncclRecv(into[-1], large, FLOAT32, 0, comm, s)
            cuda.cudaStreamSynchronize(s)
            got = [values(at) for at in into[:-1]] + [values(into[-1], large)]
        exchange(cuda, comm, s, own, out)
        cuda.ncclAllReduce(out, out, COUNT, FLOAT32, SUM, comm, s)
        cuda.cudaStreamSynchronize(s)
        found.append([*got, values(out)])
    return found


def elapsed_of(cuda: Library, begin: int, end: int) -> float:
    return float(cuda.made("cudaEventElapsedTime", begin, end, into=ctypes.c_float)) / 1e3


def exchange(cuda: Library, comm: int, s: int, out: int, into: int) -> None:
    """A message to the next rank and one from the previous, as one kernel."""
    cuda.ncclGroupStart()
    cuda.ncclSend(out, COUNT, FLOAT32, NEXT, comm, s)
    cuda.ncclRecv(into, COUNT, FLOAT32, PREVIOUS, comm, s)
    cuda.ncclGroupEnd()


def links(cuda: Library) -> Any:
    """How long a message and collectives take: as it is, slow, and healed."""
    comm, s = communicator(cuda, SIZE, RANK, RANK, NAME), stream(cuda)
    at, out = filled(cuda, 1.0), memory(cuda, SIZE * COUNT)
    path = Path(os.environ["FAKE_CUDA_LINKS"])

    def took(what: Any) -> tuple[float, float]:
        """When this rank began and ended, by the clock that all processes share."""
        split(cuda, comm, -1, 0)  # all come together, by sockets that no link slows
        begin = time.monotonic()
        what()
        cuda.cudaStreamSynchronize(s)
        return begin, time.monotonic()

    def measured() -> dict[str, tuple[float, float]]:
        whats = {
            "ring": lambda: exchange(cuda, comm, s, at, out),
            "all-reduce": lambda: cuda.ncclAllReduce(at, out, COUNT, FLOAT32, SUM, comm, s),
            "all-gather": lambda: cuda.ncclAllGather(at, out, COUNT, FLOAT32, comm, s),
        }  # fmt: skip
        found = {name: took(what) for name, what in whats.items()}
        # A sender is done before its message has crossed the link, and rank 0 changes the links.
        split(cuda, comm, -1, 0)
        return found

    exchange(cuda, comm, s, at, out)
    cuda.cudaStreamSynchronize(s)
    found = [measured()]
    for text in ("0>1 200\n", "# healed\n", "0-1 1 0.02\n"):  # 4000 bytes at 20 kB/s: 0.2 s
        if RANK == 0:
            new = path.with_suffix(".new")
            new.write_text(text)
            new.replace(path)
        cuda.ncclAllReduce(at, out, 1, FLOAT32, SUM, comm, s)
        cuda.cudaStreamSynchronize(s)
        time.sleep(0.2)  # the file is looked at every 0.05 s
        found.append(measured())
    return found


def lazily(cuda: Library) -> Any:
    """The first receive blocks the host until the sender has come; the second does not."""
    comm, s = communicator(cuda, SIZE, RANK, RANK, NAME), stream(cuda)
    at, took = memory(cuda), []
    for _ in range(2):
        before = time.monotonic()
        if RANK == 0:
            time.sleep(0.5)
            cuda.ncclSend(at, COUNT, FLOAT32, 1, comm, s)
        else:
            cuda.ncclRecv(at, COUNT, FLOAT32, 0, comm, s)
        took.append(time.monotonic() - before)
        cuda.cudaStreamSynchronize(s)
    return took


def mistakes(cuda: Library) -> Any:
    comm, s = communicator(cuda, SIZE, RANK, RANK, NAME), stream(cuda)
    pageable = ctypes.create_string_buffer(4 * COUNT)
    host, at = ctypes.addressof(pageable), memory(cuda)
    tries = {
        "pageable": lambda: cuda.ncclAllReduce(host, at, COUNT, FLOAT32, SUM, comm, s),
        "rank": lambda: cuda.ncclSend(at, COUNT, FLOAT32, SIZE, comm, s),
        "one device": lambda: communicator(cuda, SIZE, RANK, 0, NAME + "d"),
    }  # fmt: skip
    return {name: error_of(attempt) for name, attempt in tries.items()}


def aborted(cuda: Library) -> Any:
    """Nobody sends: abort ends the receive, and the stream goes on."""
    comm, s = communicator(cuda, SIZE, RANK, RANK, NAME), stream(cuda)
    at = memory(cuda)
    exchange(cuda, comm, s, at, at)
    cuda.cudaStreamSynchronize(s)
    cuda.ncclRecv(at, COUNT, FLOAT32, PREVIOUS, comm, s)
    busy = cuda.cudaStreamQuery(s, allowed=(600,))
    cuda.ncclCommAbort(comm)
    cuda.cudaStreamSynchronize(s)
    return busy


def lost(cuda: Library) -> Any:
    """Rank 1 ends without a word: rank 0 sees an error, and its receive does not end by itself."""
    comm, s = communicator(cuda, SIZE, RANK, RANK, NAME), stream(cuda)
    at = memory(cuda)
    exchange(cuda, comm, s, at, at)
    cuda.cudaStreamSynchronize(s)
    if RANK == 1:
        return None
    cuda.ncclRecv(at, COUNT, FLOAT32, 1, comm, s)
    error, until = 0, time.monotonic() + 60
    while not error and time.monotonic() < until:
        found = ctypes.c_int()
        cuda.ncclCommGetAsyncError(comm, ctypes.byref(found))
        error = found.value
    return {"error": error, "busy": cuda.cudaStreamQuery(s, allowed=(600,))}


def early(cuda: Library) -> Any:
    """Planted: a receive is posted before what its peer needs for sending, on another stream."""
    comm, s = communicator(cuda, SIZE, RANK, RANK, NAME), stream(cuda)
    compute, at = stream(cuda), memory(cuda)
    exchange(cuda, comm, s, at, at)
    cuda.cudaDeviceSynchronize()
    if RANK == 0:
        cuda.ncclRecv(at, COUNT, FLOAT32, 1, comm, s)
    ready = event(cuda)
    cuda.cudaLaunchKernel(0, *([1 << 32 | 1, 1] * 2), 0, 0, compute)
    cuda.cudaEventRecord(ready, compute)
    there, back = stream(cuda), communicator(cuda, SIZE, RANK, RANK, NAME + "b")
    if RANK == 0:
        cuda.cudaStreamWaitEvent(there, ready, 0)
        cuda.ncclSend(at, COUNT, FLOAT32, 1, back, there)
    else:
        cuda.ncclRecv(at, COUNT, FLOAT32, 0, back, there)
        arrived = event(cuda)
        cuda.cudaEventRecord(arrived, there)
        cuda.cudaStreamWaitEvent(s, arrived, 0)
        cuda.ncclSend(at, COUNT, FLOAT32, 0, comm, s)
    cuda.cudaDeviceSynchronize()
    return "ended"


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[3]](runtime())))
