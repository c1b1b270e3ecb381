"""A GPU: marks on its streams, and what messages need of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import DeviceFailed
from megatron_adaptra.base.exits import at_exit
from megatron_adaptra.base.log import log_line
from megatron_adaptra.device import gpu_bindings
from megatron_adaptra.device.base import Device, HostDevice, Mark
from megatron_adaptra.device.pci import in_sysfs

_opened: dict[tuple[int, int], CudaDevice] = {}  # by process and GPU


class CudaDevice(Device):
    """A GPU of this process; `users` close what uses it, and are called before it closes.

    Args:
        ordinal: as torch counts.
        stream: returns the address of the calling thread's current stream; torch's if None.

    Raises:
        DeviceFailed: there is no such GPU, or its driver refuses.
    """

    behind = True

    def __init__(self, ordinal: int, stream: Callable[[], int] | None = None) -> None:
        self.ordinal, self.name = ordinal, f"cuda:{ordinal}"
        self.handle = gpu_bindings.open_device(ordinal)
        self.stream = stream or (lambda: int(torch.cuda.current_stream(ordinal).cuda_stream))
        self.users: set[Callable[[], None]] = set()
        self._closed = False
        at_exit(self, CudaDevice.close)

    @property
    def pci(self) -> str:
        """Its address on the bus, as sysfs writes it: `0000:1b:00.0`."""
        return in_sysfs(self.handle.pci())

    def mark(self) -> Mark:
        """Raise DeviceFailed if the driver refuses."""
        try:
            return self.handle.mark(self.stream())
        except RuntimeError as error:
            raise DeviceFailed(str(error)) from error

    def marker(self) -> Callable[[], Mark]:
        """Return a function that raises RuntimeError if the driver refuses.

        It asks torch for the stream once, which takes longer than to mark it.
        """
        return partial(self.handle.mark, self.stream())

    def anchor(self) -> None:
        """Raise DeviceFailed if the driver refuses."""
        try:
            self.handle.anchor(self.stream())
        except RuntimeError as error:
            raise DeviceFailed(str(error)) from error

    def close(self) -> None:
        """Wait, for a while, for copies that are under way."""
        if self._closed:
            return
        self._closed = True
        for close in list(self.users):
            close()
        if left := self.handle.close(waits.CLOSE):
            log_line(left)
        _opened.pop((os.getpid(), self.ordinal), None)


def device_of(device: Any) -> Device:
    """The Device of a torch `device`, the same one in a process. Raises DeviceFailed."""
    device = torch.device(device)
    return cuda_device(device) if device.type == "cuda" else HostDevice()


def cuda_device(device: torch.device) -> CudaDevice:
    """Return the CudaDevice of a torch `device` of type cuda. Raises DeviceFailed if that fails."""
    ordinal = torch.cuda.current_device() if device.index is None else device.index
    key = os.getpid(), ordinal
    if key not in _opened:
        _opened[key] = CudaDevice(ordinal)
    return _opened[key]


def captured() -> bool:
    """Return whether the calling thread's current stream is captured into a CUDA graph, not run."""
    return bool(torch.cuda.is_current_stream_capturing())
