"""CUDA's driver calls as a test makes them; an error raises CudaError."""

from __future__ import annotations

import ctypes
from typing import Any

from fakes.hostile_cuda.build import built
from fakes.hostile_cuda.driver import load

NOT_READY = 600
NO_TIMING = 2


class CudaError(Exception):
    pass


class Cuda:
    """`cuda.cuStreamQuery(stream)`: integers are handles and addresses, 0 is none."""

    def __init__(self) -> None:
        self._library = load(built())

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)

        def call(*arguments: Any) -> None:
            wide = [ctypes.c_void_p(a) if isinstance(a, int) else a for a in arguments]
            if code := function(*wide):
                raise CudaError(f"{name}: {code}")

        return call

    def ready(self, event: int) -> bool:
        code = int(self._library.cuEventQuery(ctypes.c_void_p(event)))
        assert code in (0, NOT_READY), code
        return code == 0

    def event(self, flags: int = NO_TIMING) -> int:
        made = ctypes.c_void_p()
        self.cuEventCreate(ctypes.byref(made), ctypes.c_uint(flags))
        assert made.value
        return made.value

    def stream(self, flags: int = 1, priority: int = -5) -> int:
        made = ctypes.c_void_p()
        self.cuStreamCreateWithPriority(ctypes.byref(made), ctypes.c_uint(flags), priority)
        assert made.value
        return made.value

    def pinned(self, nbytes: int) -> int:
        made = ctypes.c_void_p()
        self.cuMemHostAlloc(ctypes.byref(made), ctypes.c_size_t(nbytes), ctypes.c_uint(0))
        assert made.value
        return made.value

    def recorded(self, stream: int) -> int:
        """A new event, recorded there."""
        event = self.event()
        self.cuEventRecord(event, stream)
        return event

    def wait(self, stream: int, event: int) -> None:
        self.cuStreamWaitEvent(stream, event, ctypes.c_uint(0))

    def to_host(self, to: int, tensor: Any, stream: int) -> None:
        self.cuMemcpyDtoHAsync_v2(to, tensor.data_ptr(), tensor.nbytes, stream)

    def to_device(self, tensor: Any, at: int, stream: int) -> None:
        self.cuMemcpyHtoDAsync_v2(tensor.data_ptr(), at, tensor.nbytes, stream)
