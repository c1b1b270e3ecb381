"""The hostile driver for Python: devices, streams, memory as tensors, kernels, findings.

A process has one driver, and one case of it at a time. Load it before what is to find it as
libcuda.so.1.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fakes.hostile_cuda.build import built

_U64, _SIZE, _PTR, _TEXT = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p
_MANY = [ctypes.c_int, _PTR, _PTR, ctypes.c_int, _PTR, _PTR]
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "open": (None, [ctypes.c_int, ctypes.c_int, _U64, ctypes.c_int]),
    "close": (None, []),
    "enter": (None, [ctypes.c_int, _TEXT]),
    "stream": (_PTR, [ctypes.c_int, _TEXT]),
    "alloc": (_PTR, [ctypes.c_int, _PTR, _SIZE, _TEXT]),
    "free": (None, [_PTR]),
    "mix": (None, [_U64, *_MANY]),
    "kernel": (None, [ctypes.c_int, _PTR, _TEXT, _U64, *_MANY]),
    "span": (None, [ctypes.c_int, _TEXT, _PTR, _PTR]),
    "read": (None, [_PTR, _PTR, _SIZE]),
    "synchronize": (ctypes.c_int, [ctypes.c_int]),
    "collective": (None, [ctypes.c_int, _PTR, _TEXT, _TEXT]),
    "sends": (None, [_TEXT, _PTR]),
    "waiting": (None, [_TEXT]),
    "give_up": (None, []),
    "promise": (None, [_TEXT, _TEXT]),
    "lose": (None, [_TEXT]),
    "fail": (None, [_TEXT, ctypes.c_int, ctypes.c_int]),
    "findings": (_SIZE, [_PTR, _SIZE]),
    "waits": (_SIZE, [_PTR, _SIZE]),
    "left": (_SIZE, [ctypes.c_int, _PTR, _SIZE]),
    "calls": (_SIZE, [_PTR, _SIZE]),
}


@functools.cache
def load(library: Path) -> ctypes.CDLL:
    """The driver, found by its soname from now on."""
    made = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(made, f"hostile_{name}")
        function.restype, function.argtypes = result, arguments
    return made


@functools.cache
def _loaded() -> ctypes.CDLL:
    """What was built says so by a digest of all sources, which is not for each kernel."""
    return load(built())


class Driver:
    """One case: `devices` with so many hardware `queues` each; `seed` decides what moves when.

    `waits`: whether it also decides that some calls wait for all that a device has.
    """

    def __init__(self, devices: int, queues: int, seed: int, waits: bool) -> None:
        self._c = _loaded()
        self._call("open", devices, queues, seed, waits)
        self._here, self._pause = threading.local(), threading.Event()
        self._open = True

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the case; its memory is gone."""
        if self._open:
            self._open = False
            self._call("close")

    def _call(self, name: str, *arguments: Any) -> Any:
        return getattr(self._c, f"hostile_{name}")(*arguments)

    def enter(self, device: int, name: str) -> None:
        """This thread works with `device`; `name` stands for it in findings."""
        self._here.device, self._here.stream = device, 0
        self._call("enter", device, name.encode())

    @property
    def device(self) -> int:
        return int(self._here.device)

    @property
    def current(self) -> int:
        """The handle of this thread's current stream; 0 is the legacy default one."""
        return int(getattr(self._here, "stream", 0))

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """With `stream` as this thread's current one."""
        before, self._here.stream = self.current, stream
        try:
            yield
        finally:
            self._here.stream = before

    def stream(self, name: str) -> int:
        return int(self._call("stream", self.device, name.encode()))

    def tensor(self, words: int, label: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Device memory of so many eight-byte `words`, which is freed with the tensor's storage."""
        at = self._call("alloc", self.device, self.current, 8 * words, label.encode())
        array = (ctypes.c_uint8 * (8 * words)).from_address(at)
        weakref.finalize(array, self._free, at).atexit = False
        return torch.frombuffer(array, dtype=dtype)

    def _free(self, at: int) -> None:
        if self._open:
            self._call("free", at)

    def kernel(
        self,
        label: str,
        number: int,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        """Launch on the current stream: each output becomes a mix of `number` and the inputs."""
        many = (*_pointers(inputs), *_pointers(outputs))
        self._call("kernel", self.device, self.current, label.encode(), number, *many)

    def span(self, label: str, device: int = 0) -> tuple[float, float]:
        """When that kernel really began and ended, on the host's monotonic clock; zeros if not."""
        begun, ended = ctypes.c_double(), ctypes.c_double()
        self._call("span", device, label.encode(), ctypes.byref(begun), ctypes.byref(ended))
        return begun.value, ended.value

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """What device memory holds, as int64; synchronise before."""
        out = torch.empty(tensor.nbytes // 8, dtype=torch.int64)
        self._call("read", out.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        return out

    def synchronize(self) -> int:
        return int(self._call("synchronize", self.device))

    def collective(self, key: str, members: Sequence[str]) -> None:
        """Launch this rank's part of a collective: it is over when all members' have begun."""
        self._call(
            "collective", self.device, self.current, key.encode(), ",".join(members).encode()
        )

    def give_up(self) -> None:
        """A rank has failed: nobody waits for its part of a collective any more."""
        self._call("give_up")

    def sends(self, key: str, tensor: torch.Tensor) -> None:
        """The message `key` will be copied from `tensor`."""
        self._call("sends", key.encode(), tensor.data_ptr())

    @contextmanager
    def waiting(self, key: str) -> Iterator[None]:
        """This thread waits, elsewhere, for the message `key`."""
        self._call("waiting", key.encode())
        try:
            yield
        finally:
            self._call("waiting", b"")

    def promise(self, key: str, thread: str) -> None:
        self._call("promise", key.encode(), thread.encode())

    def lose(self, call: str) -> None:
        """Plant: cuStreamWaitEvent waits for nothing, or to cuEventQuery all is over."""
        self._call("lose", call.encode())

    def fail(self, call: str, after: int = 0, code: int = 719) -> None:
        """After so many calls of that name all others fail with `code`; 0: none does."""
        self._call("fail", call.encode(), after, code)

    def quiet(self) -> None:
        """Let the device move for a moment."""
        self._pause.wait(0.0005)

    @property
    def findings(self) -> list[str]:
        return self._text("findings").splitlines()

    @property
    def waits(self) -> str:
        """Who waits for what now."""
        return self._text("waits")

    def left(self, device: int) -> str:
        """Streams, events, pinned memory that are still there beside the test's own."""
        return self._text("left", device)

    def calls(self) -> dict[str, dict[str, int]]:
        """By thread and call, how often."""
        out: dict[str, dict[str, int]] = {}
        for line in self._text("calls").splitlines():
            thread, call, count = line.split("\t")
            out.setdefault(thread, {})[call] = out.get(thread, {}).get(call, 0) + int(count)
        return out

    def _text(self, name: str, *arguments: Any) -> str:
        room = 1 << 16
        while True:
            buffer = ctypes.create_string_buffer(room)
            needed = self._call(name, *arguments, buffer, room)
            if needed <= room:
                return buffer.value.decode()
            room = 2 * needed

    @contextmanager
    def as_torch_cuda(self) -> Iterator[None]:
        """With torch's current stream and device being this thread's here."""

        def current_stream(device: Any = None) -> Any:
            return SimpleNamespace(cuda_stream=self.current, device_index=self.device)

        replaced: dict[str, Callable[..., Any]] = {
            "current_stream": current_stream,
            "current_device": lambda: self.device,
        }
        before = {name: getattr(torch.cuda, name) for name in replaced}
        for name, function in replaced.items():
            setattr(torch.cuda, name, function)
        try:
            yield
        finally:
            for name, function in before.items():
                setattr(torch.cuda, name, function)


def mix(number: int, inputs: Sequence[torch.Tensor], words: Sequence[int]) -> list[torch.Tensor]:
    """What a kernel makes of host memory, as int64; `words`: of each output."""
    outputs = [torch.empty(n, dtype=torch.int64) for n in words]
    _loaded().hostile_mix(number, *_pointers(inputs), *_pointers(outputs))
    return outputs


def _pointers(tensors: Sequence[torch.Tensor]) -> tuple[int, Any, Any]:
    count = len(tensors)
    at = (_PTR * count)(*[t.data_ptr() for t in tensors])
    return count, at, (_SIZE * count)(*[t.nbytes for t in tensors])
