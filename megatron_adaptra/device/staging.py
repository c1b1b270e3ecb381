"""The host's memory through which a GPU's messages go, counted and given back."""

from __future__ import annotations

from typing import Any

from megatron_adaptra.base.log import LogOnce, log_line
from megatron_adaptra.device import gpu_bindings
from megatron_adaptra.device.base import Memory
from megatron_adaptra.device.cuda import CudaDevice
from megatron_adaptra.device.pci import node_near

NO_LIMIT = 1 << 62


class Staging:
    """Pinned memory of messages, in the engine's memory where the driver allows.

    It is taken from the GPU's NUMA node, where the system knows that and lets a process choose.

    `device`: the GPU. `engine`: the C++ one. The plan limits the number of messages under way: to
    wait for memory would be to wait for each other.
    """

    def __init__(self, device: CudaDevice, engine: Any) -> None:
        self.device = device
        self.pinned = gpu_bindings.new_pinned(device.handle, engine, NO_LIMIT)
        self._once = LogOnce()
        node = node_near(device.pci)
        self._log(
            "" if node is None else engine.prefer_node(node),
            f"messages' memory is wherever the system has some, and not on NUMA node {node}, which "
            "is the GPU's",
        )
        self.reserved = -1  # the iteration at whose beginning reserved blocks may go; -1 for none

    def memory(self) -> Memory:
        """Return the host memory that messages take, in bytes."""
        words = self.pinned.copied(), self.pinned.unpinned()
        return Memory(*self.pinned.bytes(), *words)

    def new_peak(self) -> None:
        """Count the peak from here on."""
        self.pinned.new_peak()

    def prepare(self, nbytes: int, count: int) -> None:
        """Pin `count` blocks of `nbytes` before messages need them; returns at once.

        Pinning takes milliseconds, in which a driver may hold up launches as well.
        """
        self.pinned.prepare(self.device.handle, nbytes, count)

    def reserve(self, nbytes: int, count: int, until: int) -> str:
        """Have `count` blocks of `nbytes` pinned when it returns, for the iteration `until`.

        Nothing is to be trimmed before that one has begun. Waits for the driver, on any thread.
        Returns why the driver pins no more, or an empty string.
        """
        self.reserved = until
        why = self.pinned.reserve(nbytes, count)
        if why:
            self.reserved = -1
        return why

    def trim(self, all: bool = False) -> None:
        """At an iteration's end: give back what it has not used; `all` that is idle.

        Returns at once. Memory that RDMA devices use stays until the endpoint closes. The driver
        is asked again to pin memory, if it had none. One line of the log has why it pins none of
        the engine's memory, if it does not, and one why messages go through memory not pinned.
        """
        memory = self.memory()
        if memory.held or memory.unpinned:  # else nothing is to be done, and no thread is woken
            self.pinned.trim(self.device.handle, all)
        self._log(
            memory.copied,
            "messages go through memory of the driver, from where the engine copies them once more",
        )
        self._log(
            memory.unpinned,
            "messages go through memory that is not pinned, which takes longer",
        )

    def _log(self, why: str, words: str) -> None:
        """Log `words` and the reason `why` once; nothing if that is empty."""
        if why:
            self._once.line(f"{self.device.name}: {words}: {why}", write=log_line, about=words)

    def close(self) -> None:
        """Give back all, and what is under way when that has ended."""
        self.pinned.close(self.device.handle)
