"""Scenarios of memory and copies, by the driver or the runtime: one is named on the line."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from calls import NON_BLOCKING, NOT_READY, Library, driver, elapsed, error_of, runtime
from fakes.cuda import accounts

MIB = 1 << 20
TYPE, ORDINAL = 2, 9  # attributes of a pointer


def attribute(cuda: Library, which: int, pointer: int) -> int:
    return int(cuda.made("cuPointerGetAttribute", which, pointer, into=ctypes.c_uint))


def copies(cuda: Library) -> Any:
    """Bytes go to the device and back through pinned memory; not before the stream comes to it."""
    device, pinned = cuda.made("cuMemAlloc_v2", MIB), cuda.made("cuMemHostAlloc", MIB, 0)
    other = cuda.made("cuMemHostAlloc", MIB, 0)
    ctypes.memset(pinned, 7, MIB)
    s = cuda.made("cuStreamCreateWithPriority", NON_BLOCKING, 0)
    for _ in range(200):
        cuda.cuLaunchKernel(0, 1, 1, 1, 1, 1, 1, 0, s, 0, 0)
    cuda.cuMemcpyHtoDAsync_v2(device, pinned, MIB, s)
    cuda.cuMemcpyDtoHAsync_v2(other, device, MIB, s)
    early = ctypes.string_at(other, 1)
    cuda.cuStreamSynchronize(s)
    late = ctypes.string_at(other, MIB)
    # Pageable memory has been read when the call returns, and is written before it returns.
    source, target = ctypes.create_string_buffer(b"a" * 100), ctypes.create_string_buffer(100)
    cuda.cuLaunchKernel(0, 1, 1, 1, 1, 1, 1, 0, s, 0, 0)
    cuda.cuMemcpyHtoDAsync_v2(device, ctypes.addressof(source), 100, s)
    ctypes.memset(source, 0, 100)
    cuda.cuMemcpyDtoHAsync_v2(ctypes.addressof(target), device, 100, s)
    return {"early": early[0], "late": late == b"\7" * MIB, "pageable": target.raw.decode()}


def kinds(cuda: Library) -> Any:
    buffer = ctypes.create_string_buffer(5000)
    at = ctypes.addressof(buffer)
    device, pinned = cuda.made("cuMemAlloc_v2", 100), cuda.made("cuMemHostAlloc", 100, 0)
    found: dict[str, Any] = {"pageable": error_of(attribute, cuda, TYPE, at)}
    cuda.cuMemHostRegister_v2(at, 5000, 0)
    found["registered"] = attribute(cuda, TYPE, at + 4999)
    found["twice"] = error_of(cuda.cuMemHostRegister_v2, at + 100, 10, 0)
    cuda.cuMemHostUnregister(at)
    found["no more"] = error_of(attribute, cuda, TYPE, at)
    found["unregistered twice"] = error_of(cuda.cuMemHostUnregister, at)
    found["device"] = attribute(cuda, TYPE, device + 50), attribute(cuda, ORDINAL, device)
    found["pinned"] = attribute(cuda, TYPE, pinned)
    found["free of a stranger"] = error_of(cuda.cuMemFreeHost, at)
    return found


def counted(cuda: Library) -> Any:
    """What is free, and the accounts that others read while this runs."""
    folder = Path(os.environ["FAKE_CUDA_ACCOUNTS"])

    def now() -> dict[str, int]:
        free, total = ctypes.c_uint64(), ctypes.c_uint64()
        cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        found = accounts.of_rank(folder, 0)
        used = total.value - free.value
        wanted = ("device_bytes", "device_peak", "pinned_bytes", "pinned_peak")
        return {"used": used, **{name: found[name] for name in wanted}}

    states = [now()]
    device, pinned = cuda.made("cuMemAlloc_v2", 3 * MIB), cuda.made("cuMemHostAlloc", 2 * MIB, 0)
    states.append(now())
    cuda.cuMemFree_v2(device)
    cuda.cuMemFreeHost(pinned)
    states.append(now())
    full = error_of(cuda.made, "cuMemAlloc_v2", 200 * MIB)
    return {"states": states, "full": full, "calls": accounts.of_rank(folder, 0)["calls"]}


def both(cuda: Library) -> Any:
    """Streams, events and memory of the runtime are the driver's, too, and the device as well."""
    rt = runtime()
    rt.cudaSetDevice(3)
    device = cuda.made("cuCtxGetDevice", into=ctypes.c_int)
    s, e = (
        rt.made("cudaStreamCreateWithFlags", NON_BLOCKING),
        rt.made("cudaEventCreateWithFlags", 0),
    )
    memory = rt.made("cudaMalloc", MIB)
    rt.cudaMemsetAsync(memory, 5, MIB, s)
    cuda.cuEventRecord(e, s)
    cuda.cuEventSynchronize(e)
    return {
        "device": device, "of memory": attribute(cuda, ORDINAL, memory),
        "query": rt.cudaEventQuery(e), "byte": ctypes.string_at(memory, 1)[0],
        "driver's": error_of(rt.cudaStreamQuery, cuda.made("cuStreamCreateWithPriority", 1, 0)),
    }  # fmt: skip


def long_copy(cuda: Library) -> Any:
    """A copy takes its bytes' time."""
    device, pinned = cuda.made("cuMemAlloc_v2", 64 * MIB), cuda.made("cuMemHostAlloc", 64 * MIB, 0)
    s = cuda.made("cuStreamCreateWithPriority", NON_BLOCKING, 0)
    before = time.monotonic()
    cuda.cuMemcpyHtoDAsync_v2(device, pinned, 64 * MIB, s)
    returned = time.monotonic() - before
    busy = cuda.cuStreamQuery(s, allowed=(NOT_READY,))
    cuda.cuStreamSynchronize(s)
    return {"returned": returned, "busy": busy, "took": time.monotonic() - before}


def rates(cuda: Library) -> Any:
    """Seconds that 4 MiB take: each way, both ways at once, and twice one way, by two streams."""
    device, pinned = cuda.made("cuMemAlloc_v2", 8 * MIB), cuda.made("cuMemHostAlloc", 8 * MIB, 0)
    a, b = (cuda.made("cuStreamCreateWithPriority", NON_BLOCKING, 0) for _ in range(2))
    begin, end, other = (cuda.made("cuEventCreate", 0) for _ in range(3))

    def out(on: int) -> None:
        cuda.cuMemcpyDtoHAsync_v2(pinned, device, 4 * MIB, on)

    def back(on: int) -> None:
        cuda.cuMemcpyHtoDAsync_v2(device + 4 * MIB, pinned + 4 * MIB, 4 * MIB, on)

    def seconds(first: Any, second: Any) -> float:
        cuda.cuEventRecord(begin, a)
        cuda.cuStreamWaitEvent(b, begin, 0)
        first(a)
        second(b)
        cuda.cuEventRecord(end, a)
        cuda.cuEventRecord(other, b)
        cuda.cuEventSynchronize(end)
        cuda.cuEventSynchronize(other)
        return max(elapsed(cuda, begin, end), elapsed(cuda, begin, other))

    def nothing(_: int) -> None: ...

    return {
        "out": seconds(out, nothing), "back": seconds(back, nothing),
        "both ways": seconds(out, back), "twice": seconds(out, out),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[3]](driver())))
