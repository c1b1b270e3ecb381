"""Messages as NCCL's are, for planted faults: a receive is work on the device that waits.

Of what is sent nothing arrives but the fact; each receive gets the same words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from fakes.hostile_cuda.cuda import Cuda
from fakes.hostile_cuda.driver import Driver

from megatron_adaptra.transport.base import Stamps, Traits


class NcclLike:
    """A Transport of `me`; `ranks`: of its pipeline's stages. A stream by peer and direction."""

    traits = Traits("nccl-like", False, ("cuda",))

    def __init__(self, driver: Driver, me: int, ranks: Sequence[int]) -> None:
        self._driver, self._me, self._cuda, self._ranks = driver, me, Cuda(), ranks
        self._streams: dict[str, int] = {}

    def isend(self, buffer: torch.Tensor, peer: int, tag: int) -> _Work:
        stream, key = self._stream(f"sends to {peer}"), f"{self._me}>{self._ranks[peer]} {tag}"
        self._cuda.wait(stream, self._cuda.recorded(self._driver.current))
        with self._driver.on(stream):
            self._driver.signals(key, f"the send of message {key}")
        return _Work(self._driver, 0)

    def irecv(self, buffer: torch.Tensor, peer: int, tag: int) -> _Work:
        rank = self._ranks[peer]
        stream, key = self._stream(f"receives from {peer}"), f"{rank}>{self._me} {tag}"
        self._driver.promise(key, f"rank {rank}")
        self._cuda.wait(stream, self._cuda.recorded(self._driver.current))
        with self._driver.on(stream):
            self._driver.outside(key, f"the receive of message {key}")
            self._driver.kernel(f"message {key}", 1, [], [buffer])
        return _Work(self._driver, self._cuda.recorded(stream))

    def close(self) -> None: ...

    def _stream(self, name: str) -> int:
        if name not in self._streams:
            self._streams[name] = self._driver.stream(name)
        return self._streams[name]


class _Work:
    def __init__(self, driver: Driver, event: int) -> None:
        self._driver, self._event, self.stamps = driver, event, Stamps(eager=True)

    def done(self) -> bool:
        return True

    def wait(self, timeout: float) -> Stamps:
        if self._event:
            Cuda().wait(self._driver.current, self._event)
        return self.stamps

    def abort(self) -> None: ...
