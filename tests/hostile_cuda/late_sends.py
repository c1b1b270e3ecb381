"""A planted fault: what copies a message is put on the device some time after the send returned."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from fakes.hostile_cuda.cuda import Cuda
from fakes.hostile_cuda.driver import Driver

from megatron_adaptra.transport.base import Transport


class LateSends:
    """Does the sends of `transport` on a thread of its own, which is always late."""

    def __init__(self, driver: Driver, transport: Transport, me: int) -> None:
        self._driver, self._transport, self._me = driver, transport, me
        self.traits = transport.traits
        self._cuda, self._stream = Cuda(), driver.stream("late sends")
        self._todo: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def isend(self, buffer: torch.Tensor, peer: int, tag: int) -> _Later:
        memory, work, made = buffer.detach(), _Later(), self._cuda.recorded(self._driver.current)

        def send() -> None:
            self._driver.quiet()
            self._cuda.wait(self._stream, made)
            self._cuda.cuEventDestroy_v2(made)
            work.begins(self._transport.isend(memory, peer, tag))

        self._todo.put(send)
        return work

    def irecv(self, buffer: torch.Tensor, peer: int, tag: int) -> Any:
        return self._transport.irecv(buffer, peer, tag)

    def close(self) -> None:
        """Its thread has ended; the transport belongs to the caller."""
        self._todo.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._driver.enter(self._me, f"late sends of rank {self._me}")
        with self._driver.on(self._stream):
            while (send := self._todo.get()) is not None:
                send()


class _Later:
    """A send that is still to begin."""

    def __init__(self) -> None:
        self._begun, self._work = threading.Event(), None

    def begins(self, work: Any) -> None:
        self._work = work
        self._begun.set()

    def wait(self, timeout: float) -> Any:
        assert self._begun.wait(timeout)
        assert self._work is not None
        return self._work.wait(timeout)
