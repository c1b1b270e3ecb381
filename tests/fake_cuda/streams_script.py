"""Scenarios of streams, events and queues, by the driver: one is named on the line."""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time
from typing import Any

from calls import NON_BLOCKING, NOT_READY, Library, driver, elapsed, error_of

HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
LONG = 500  # kernels, of 1 ms by the tests


def stream(cuda: Library, flags: int = NON_BLOCKING) -> int:
    return int(cuda.made("cuStreamCreateWithPriority", flags, 0))


def event(cuda: Library) -> int:
    return int(cuda.made("cuEventCreate", 0))


def kernels(cuda: Library, on: int, count: int) -> None:
    for _ in range(count):
        cuda.cuLaunchKernel(0, 1, 1, 1, 1, 1, 1, 0, on, 0, 0)


def timed(cuda: Library, on: int, count: int) -> tuple[int, int]:
    begin, end = event(cuda), event(cuda)
    cuda.cuEventRecord(begin, on)
    kernels(cuda, on, count)
    cuda.cuEventRecord(end, on)
    return begin, end


def in_order(cuda: Library) -> Any:
    """Launches return at once; the events know when the stream passed them."""
    a, before = stream(cuda), time.monotonic()
    begin, end = timed(cuda, a, LONG)
    launching = time.monotonic() - before
    asked = (
        cuda.cuEventQuery(end, allowed=(NOT_READY,)),
        cuda.cuStreamQuery(a, allowed=(NOT_READY,)),
    )
    early = error_of(elapsed, cuda, begin, end)
    cuda.cuEventSynchronize(end)
    return {
        "launching": launching, "took": elapsed(cuda, begin, end), "asked": asked, "early": early,
        "then": cuda.cuEventQuery(end), "stream": cuda.cuStreamQuery(a),
    }  # fmt: skip


def waits(cuda: Library) -> Any:
    """A stream waits for an event as it was recorded last before the wait."""
    a, b = stream(cuda), stream(cuda)
    begin, middle = timed(cuda, a, 100)
    cuda.cuStreamWaitEvent(b, middle, 0)
    kernels(cuda, a, 300)
    cuda.cuEventRecord(middle, a)  # recorded again: of no concern to b
    end = event(cuda)
    cuda.cuEventRecord(end, b)
    cuda.cuEventSynchronize(end)
    never = event(cuda)
    cuda.cuStreamWaitEvent(b, never, 0)  # never recorded: nothing to wait for
    cuda.cuStreamSynchronize(b)
    return {"b": elapsed(cuda, begin, end), "a": cuda.cuStreamQuery(a, allowed=(NOT_READY,))}


def queues(cuda: Library) -> Any:
    """The second stream's kernel stands behind a wait of the first's if they share a queue."""
    a, b, other = stream(cuda), stream(cuda), stream(cuda)
    slow = timed(cuda, other, 200)
    cuda.cuStreamWaitEvent(a, slow[1], 0)
    first, last = timed(cuda, b, 1)
    cuda.cuEventSynchronize(last)
    cuda.cuCtxSynchronize()
    return {"until": elapsed(cuda, slow[0], last), "one": elapsed(cuda, first, last)}


def depth(cuda: Library) -> Any:
    """A full queue blocks the launch."""
    a, before = stream(cuda), time.monotonic()
    kernels(cuda, a, LONG)
    return {"launching": time.monotonic() - before}


def synchronised(cuda: Library) -> Any:
    """The device waits for all streams; so does freeing memory."""
    found = {}
    for name in ("cuCtxSynchronize", "cuMemFree_v2"):
        a, b = stream(cuda), stream(cuda)
        memory = cuda.made("cuMemAlloc_v2", 1000)
        kernels(cuda, a, 200)
        kernels(cuda, b, 100)
        if name == "cuMemFree_v2":
            cuda.cuMemFree_v2(memory)
        else:
            cuda.cuCtxSynchronize()
        states = [cuda.cuStreamQuery(s, allowed=(NOT_READY,)) for s in (a, b)]
        cuda.cuCtxSynchronize()
        found[name] = states
    return found


def legacy(cuda: Library) -> Any:
    """The default stream is ordered with streams that were made to block, and with no others."""
    blocking, free = stream(cuda, 0), stream(cuda)
    begin, end = timed(cuda, blocking, 100)
    on_default, on_free = event(cuda), event(cuda)
    cuda.cuEventRecord(on_default, 0)
    cuda.cuEventRecord(on_free, free)
    kernels(cuda, 0, 100)
    after = event(cuda)
    cuda.cuEventRecord(after, blocking)
    cuda.cuCtxSynchronize()
    names = {"default": on_default, "free": on_free, "after": after, "end": end}
    return {name: elapsed(cuda, begin, e) for name, e in names.items()}


def host_functions(cuda: Library) -> Any:
    """A function of the host runs in its stream's order; the stream goes on after it."""
    a, on_main, go = stream(cuda), [], threading.Event()

    def function(_: object) -> None:
        go.wait(30)
        on_main.append(threading.current_thread() is threading.main_thread())

    kept = HOST_FUNCTION(function)
    cuda.cuLaunchHostFunc(a, kept, 0)
    end = event(cuda)
    cuda.cuEventRecord(end, a)
    before = cuda.cuEventQuery(end, allowed=(NOT_READY,))
    go.set()
    cuda.cuEventSynchronize(end)
    return {"before": before, "main": on_main}


def mistakes(cuda: Library) -> Any:
    """What a real driver answers: handles that are none, events without times, no context."""
    a, plain = stream(cuda), int(cuda.made("cuEventCreate", 2))
    recorded = event(cuda)
    for e in (plain, recorded):
        cuda.cuEventRecord(e, a)
    cuda.cuCtxSynchronize()
    tries = {
        "untimed": lambda: elapsed(cuda, recorded, plain),
        "unrecorded": lambda: elapsed(cuda, recorded, event(cuda)),
        "no stream": lambda: cuda.cuStreamSynchronize(4096),
        "no event": lambda: cuda.cuEventRecord(4096, a),
        "destroyed": lambda: (cuda.cuStreamDestroy_v2(a), cuda.cuStreamQuery(a)),
        "no device": lambda: cuda.made("cuDeviceGet", 99, into=ctypes.c_int),
        "no context": lambda: (cuda.cuCtxSetCurrent(0), stream(cuda)),
    }
    found: dict[str, Any] = {name: error_of(attempt) for name, attempt in tries.items()}
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    cuda.cuGetErrorName(NOT_READY, ctypes.byref(name))
    cuda.cuGetErrorString(NOT_READY, ctypes.byref(text))
    return {**found, "name": (name.value or b"").decode(), "text": (text.value or b"").decode()}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[3]](driver())))
