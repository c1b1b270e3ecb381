"""CUDA and NCCL called from a script without torch: the driver, or the runtime and NCCL with it.

Used inside a process that machine.py has started. Every call that fails raises CallFailed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

NON_BLOCKING = 1
FLOAT32, SUM = 7, 0


class CallFailed(RuntimeError):
    def __init__(self, name: str, error: int) -> None:
        super().__init__(f"{name}: error {error}")
        self.error = error


class Library:
    """Functions by name: `library.cuInit(0)`. Numbers are 64 bits wide, floats doubles of C."""

    def __init__(self, name: str | None) -> None:
        self._library = ctypes.CDLL(name)

    def __getattr__(self, name: str) -> Callable[..., int]:
        function = getattr(self._library, name)

        def call(*words: Any, allowed: tuple[int, ...] = ()) -> int:
            given = [ctypes.c_uint64(w) if isinstance(w, int) else w for w in words]
            error = function(*given)
            if error and error not in allowed:
                raise CallFailed(name, error)
            return int(error)

        return call

    def made(self, name: str, *words: Any, into: Any = ctypes.c_uint64) -> Any:
        """The value that a call writes through its first argument."""
        value = into()
        getattr(self, name)(ctypes.byref(value), *words)
        return value.value


def error_of(call: Callable[..., Any], *words: Any) -> int:
    """The error that a call ends with; 0 for none."""
    try:
        call(*words)
    except CallFailed as failed:
        return failed.error
    return 0


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


def driver() -> Library:
    """Found by its name alone, as the engine does; with a context of device 0."""
    cuda = Library("libcuda.so.1")
    cuda.cuInit(0)
    cuda.cuCtxSetCurrent(cuda.made("cuDevicePrimaryCtxRetain", 0))
    return cuda


def runtime() -> Library:
    """The runtime and NCCL: preloaded."""
    return Library(None)


def communicator(cuda: Library, size: int, rank: int, device: int, name: str) -> int:
    """By a name instead of an id, which the ranks would have to exchange."""
    cuda.cudaSetDevice(device)
    text = UniqueId(name.encode())
    return int(cuda.made("ncclCommInitRank", size, text, rank))


def floats(address: int, count: int) -> Any:
    """Memory as a list of float32; the fake's device memory can be read by the host."""
    return (ctypes.c_float * count).from_address(address)
