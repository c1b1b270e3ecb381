"""GPUs for a test: a process with the driver of libcuda.cpp, whose streams the test controls."""

from __future__ import annotations

import ctypes
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fakes.over_library import compiled, run_over
from patience import PATIENCE

from benchmarks.folder_rendezvous import FolderRendezvous
from megatron_adaptra.device.cuda import CudaDevice
from megatron_adaptra.device.staging import Staging
from megatron_adaptra.transport.engine.endpoint import Endpoint
from megatron_adaptra.transport.engine.on_device import DeviceTransport
from megatron_adaptra.transport.engine.transport import End

SOURCE = Path(__file__).with_name("libcuda.cpp")


class Copies(NamedTuple):
    """Copies in one direction: how many, their bytes, and the GPU's seconds for them."""

    count: int
    bytes: int
    seconds: float


def copies_of(transport: DeviceTransport) -> tuple[Copies, Copies]:
    """Copies that the GPU has made of messages, from its memory and to it."""
    out, back = transport._messages.copies()
    return Copies(*out), Copies(*back)


def driver_file() -> Path:
    """The driver, compiled."""
    return compiled(SOURCE, "libcuda.so.1")


class Driver:
    """What the driver does for a test. A stream is its address."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        for name in ("pinned", "streams", "events", "contexts", "calls"):
            getattr(self.library, f"test_{name}").restype = ctypes.c_long
        self.library.test_stream.restype = ctypes.c_void_p
        self.library.test_clock.argtypes = [ctypes.c_double, ctypes.c_double]
        self.library.test_slow_copies.argtypes = [ctypes.c_double]
        self.library.test_late.argtypes = [ctypes.c_int, ctypes.c_double]
        self._gates: list[Any] = []

    def stream(self) -> int:
        return int(self.library.test_stream())

    def stop(self, stream: int) -> Callable[[], None]:
        """The stream stands still from here on, until what is returned is called."""
        gate = ctypes.c_long(0)
        self._gates.append(gate)
        self.library.test_stop(ctypes.c_void_p(stream), ctypes.byref(gate))
        return lambda: self.library.test_go(ctypes.byref(gate))

    def stop_pinning(self) -> Callable[[], None]:
        """Calls that pin memory wait until what is returned is called."""
        gate = ctypes.c_long(0)
        self._gates.append(gate)
        self.library.test_stop_pinning(ctypes.byref(gate))
        return lambda: self.library.test_go(ctypes.byref(gate))

    def refuse_pinning(self, code: int) -> None:
        """No memory is pinned from now on; with 0 it is again."""
        self.library.test_unpinnable(code)

    def stop_copies(self, way: str, after: int) -> Callable[[], None]:
        """Copies `way` ("out" of a GPU, "in") stand still once `after` more are on a stream.

        Until what is returned is called; where that is asked for twice, the later word holds.
        """
        gate = ctypes.c_long(0)
        self._gates.append(gate)
        self.library.test_stop_copies(int(way == "in"), after, ctypes.byref(gate))
        return lambda: self.library.test_go(ctypes.byref(gate))

    def fill(self, stream: int, tensor: torch.Tensor, value: int) -> None:
        at = ctypes.c_void_p(tensor.data_ptr())
        size = ctypes.c_size_t(tensor.nbytes)
        self.library.test_fill(ctypes.c_void_p(stream), at, value, size)

    def copy(self, stream: int, to: torch.Tensor, source: torch.Tensor) -> None:
        at = ctypes.c_void_p(to.data_ptr()), ctypes.c_void_p(source.data_ptr())
        self.library.test_copy(ctypes.c_void_p(stream), *at, ctypes.c_size_t(to.nbytes))

    def finish(self, stream: int) -> None:
        self.library.test_finish(ctypes.c_void_p(stream))

    def capture(self, stream: int, on: bool) -> None:
        self.library.test_capture(ctypes.c_void_p(stream), on)

    def fail(self, call: str, after: int = 0, code: int = 700) -> None:
        """The next call of this name but `after` fails; with code 700 so does each later one."""
        self.library.test_fail(call.encode(), after, code)

    def heal(self) -> None:
        self.library.test_heal()

    def clock(self, offset: float, rate: float) -> None:
        self.library.test_clock(offset, rate)

    def late(self, seed: int, seconds: float) -> None:
        """Half of all that is on a stream begins up to so many seconds late."""
        self.library.test_late(seed, seconds)

    def slow_copies(self, seconds: float) -> None:
        """Each copy takes so long from now on."""
        self.library.test_slow_copies(seconds)

    def version(self, version: int, devices: int) -> None:
        self.library.test_version(version, devices)

    def calls(self, name: str) -> int:
        return int(self.library.test_calls(name.encode()))

    def left(self) -> dict[str, int]:
        """What is open."""
        names = ("pinned", "streams", "events", "contexts")
        return {name: int(getattr(self.library, f"test_{name}")()) for name in names}


class Side:
    """One of two ranks of a process: a GPU with a stream for compute, and its end of messages."""

    def __init__(self, driver: Driver, rank: int, endpoint: Endpoint) -> None:
        self.rank, self.driver, self.endpoint = rank, driver, endpoint
        self.compute = driver.stream()
        self.device = CudaDevice(rank, lambda: self.compute)
        self.staging = Staging(self.device, endpoint.engine)
        until(lambda: self.device.handle.anchors() == 1, "the first anchor is there")

    def open(self, name: str = "messages", **options: Any) -> DeviceTransport:
        peer = 1 - self.rank
        ends = {peer: End(peer, f"stage {peer} (rank {peer})")}
        return DeviceTransport(self.endpoint, name, ends, self.staging, self.rank, **options)


@contextmanager
def two(driver: Driver, kind: str = "shm") -> Iterator[tuple[Side, Side]]:
    """Two ranks with paths between them; everything is closed, and nothing left."""
    before = driver.left()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = FolderRendezvous(Path(folder))
        ends = [
            Endpoint(rank, "127.0.0.1", "one" if kind == "shm" else str(rank), rendezvous, PATIENCE)
            for rank in (0, 1)
        ]
        for rank in (1, 0):
            ends[rank].connect([1 - rank])
        sides = [Side(driver, rank, ends[rank]) for rank in (0, 1)]
        yield sides[0], sides[1]
        for side in sides:
            side.staging.close()
            side.endpoint.close()  # what it has still to send goes back
            side.device.close()
        del sides, side
    left = driver.left()
    assert left == before, left
    assert [t.name for t in threading.enumerate() if t.name.startswith("adaptra-")] == []
    assert not {"adaptra-device", "adaptra-pins"} & set(native_threads())


def native_threads() -> list[str]:
    tasks = Path("/proc/self/task").glob("*/comm")
    return [task.read_text().strip() for task in tasks]


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for what has no event to wait for."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(1e-3)


def run(body: Callable[..., Any], *args: Any) -> Any:
    """What `body(driver, *args)` returned in a process of its own; raises what it raised."""
    return run_over(driver_file(), Driver, body, args)
