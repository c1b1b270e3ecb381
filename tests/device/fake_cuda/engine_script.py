"""Scenarios of the engine over the fake driver: one is named on the line."""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from calls import NON_BLOCKING, Library, driver, error_of

from megatron_adaptra.transport.engine import _native

GLOBAL, THREAD_LOCAL, RELAXED = range(3)  # modes of captures and threads
PATIENCE = 60.0  # seconds
LOOK = 1e-3  # seconds between two looks for what has no event


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"not within {PATIENCE:g} s: {what}"
        time.sleep(LOOK)


def opened() -> _native.Device:
    device = _native.Device.open(0)
    until(lambda: device.anchors() == 1, "the first anchor")
    return device


def stream(cuda: Library) -> int:
    return int(cuda.made("cuStreamCreateWithPriority", NON_BLOCKING, 0))


def exchanged(cuda: Library, mode: int) -> int:
    """The mode of this thread, which is `mode` from now on."""
    before = ctypes.c_int(mode)
    cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(before))
    return before.value


def error_of_end(cuda: Library, capturing: int) -> int:
    return error_of(cuda.cuStreamEndCapture, capturing, ctypes.byref(ctypes.c_uint64()))


def captured(cuda: Library) -> Any:
    """Marks are read, on the capturing thread and on another, in each of the threads' modes.

    By capture, mode and thread: what was read, the mode afterwards, and the error of the
    capture's end. What is read has passed, has not, or is of a device that has been closed.
    """
    device, marked, capturing = opened(), stream(cuda), stream(cuda)
    found = {}

    def read(mark: _native.Mark, mode: int) -> tuple[str, int]:
        exchanged(cuda, mode)
        at = mark.at()
        word = "read" if at is not None else mark.fault or "not yet"
        return word, exchanged(cuda, GLOBAL)

    def case(name: str, make: Callable[[], _native.Mark]) -> None:
        for mode in (GLOBAL, THREAD_LOCAL, RELAXED):
            for where in ("another", "own"):
                mark = make()
                cuda.cuStreamBeginCapture_v2(capturing, GLOBAL)
                if where == "own":
                    word, after = read(mark, mode)
                else:
                    with ThreadPoolExecutor(1) as pool:
                        word, after = pool.submit(read, mark, mode).result(PATIENCE)
                error = error_of_end(cuda, capturing)
                found[f"{name}, {mode}, {where}"] = [word, after == mode, error]

    def passed() -> _native.Mark:
        mark = device.mark(marked)
        cuda.cuStreamSynchronize(marked)
        return mark

    def behind() -> _native.Mark:
        cuda.cuLaunchKernel(0, 1, 1, 1, 1, 1, 1, 0, marked, 0, 0)
        return device.mark(marked)

    case("passed", passed)
    case("not yet", behind)
    of_closed = [behind() for _ in range(6)]
    device.close(PATIENCE)
    case("closed", of_closed.pop)
    return found


def sent(cuda: Library) -> Any:
    """A message pins memory on the thread that sends it, while another thread captures."""
    device, s, capturing = opened(), stream(cuda), stream(cuda)
    memory, engine = int(cuda.made("cuMemAlloc_v2", 1 << 20)), _native.Engine()
    engine.add_peer(1, "rank 1")
    pinned = _native.Pinned(device, engine, 1 << 30)
    messages = _native.DeviceMessages(
        engine, device, pinned, 0, [1], "messages", _native.message_piece()
    )
    cuda.cuStreamBeginCapture_v2(capturing, GLOBAL)
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(messages.send, 1, 7, memory, 1 << 20, s, None).result(PATIENCE)
    held = pinned.bytes()[0]
    error = error_of_end(cuda, capturing)
    messages.abort(work, PATIENCE)
    messages.close(PATIENCE)
    del work, messages
    pinned.close(device)
    device.close(PATIENCE)
    return {"pinned": held, "end": error}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[3]](driver())))
