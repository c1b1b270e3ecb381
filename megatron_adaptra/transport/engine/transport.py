"""Messages over the endpoint, as the rest of the package knows them (transport/base.py)."""

from __future__ import annotations

import ctypes
import hashlib
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron_adaptra.base.errors import PeerLost
from megatron_adaptra.emulate.links import LinkEmulator
from megatron_adaptra.transport import base
from megatron_adaptra.transport.base import Stamps, Traits, Transport
from megatron_adaptra.transport.engine.endpoint import Endpoint

if TYPE_CHECKING:
    from megatron_adaptra.transport.engine.bindings import Work

# Bytes of a message from which on its peer is worth connections over RDMA.
LARGE = 1 << 18


@dataclass(frozen=True)
class End:
    """A peer of a transport: its global rank, and its name in errors."""

    rank: int
    name: str


def tag_space_of(name: str) -> int:
    """The upper 32 bits of the tags of transport `name`: messages of other names never match."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") << 32


class EngineTransport(Transport):
    """Transport for a CPU's memory.

    Args:
        endpoint: of this process, which several transports share.
        name: the same at both ends; messages of different names never match.
        peers: by the number that callers use; they have to be connected.
        emulator: delays sends as a slow link would.
        rails: the first large message from or to a peer opens connections over RDMA with it.
    """

    traits = Traits("engine", False, ("cpu",))
    device = torch.device("cpu")

    def __init__(
        self,
        endpoint: Endpoint,
        name: str,
        peers: Mapping[int, End],
        emulator: LinkEmulator | None = None,
        rails: bool = True,
    ) -> None:
        self._endpoint, self._engine = endpoint, endpoint.engine
        self._large = LARGE if rails else sys.maxsize
        self._peers, self._emulator = dict(peers), emulator
        self._tag_space = tag_space_of(name)
        self._receives: set[_Receive] = set()  # that have not been waited for
        self._delayed: list[_DelayedSend] = []  # by the emulator
        self._closed = False
        self._open_ones = endpoint.transports
        self._open_ones.add(self)

    def registered(self, nbytes: int) -> torch.Tensor:
        """`nbytes` of the engine's memory.

        A send from its first byte on copies nothing: it may change only when that has ended.
        """
        return torch.frombuffer(self._engine.take(nbytes), dtype=torch.uint8)

    def isend(self, buffer: torch.Tensor, peer: int, tag: int) -> _Send | _DelayedSend:
        end = self._open(peer, buffer.nbytes)
        payload = buffer if buffer.is_contiguous() else buffer.detach().contiguous()
        nbytes, key = payload.nbytes, self._tag_space | tag
        if self._emulator is None or not self._emulator.holds(peer):
            return _Send(end, tag, self._engine.send(end.rank, key, payload.data_ptr(), nbytes))
        work = _DelayedSend(end, tag)
        block = self._engine.take(nbytes)
        ctypes.memmove(block.address, payload.data_ptr(), nbytes)

        def deliver() -> None:
            if not work.done():  # else it was aborted
                ready = work.stamps.sent
                work.hand_over(self._engine.send(end.rank, key, block.address, nbytes, ready))

        self._delayed = [w for w in self._delayed if not w.done()]
        self._delayed.append(work)
        self._emulator.hold(peer, nbytes, deliver)
        return work

    def irecv(self, buffer: torch.Tensor, peer: int, tag: int, exact: bool = True) -> _Receive:
        """Receive from `peer` with `tag`; if not `exact` the message may be shorter.

        Raises PeerLost if this side is closed, ValueError for memory that is not contiguous.
        """
        end = self._open(peer, buffer.nbytes if exact else 0)
        if not buffer.is_contiguous():
            raise ValueError(f"message {tag}: a receive needs contiguous memory")
        key = self._tag_space | tag
        handle = self._engine.receive(end.rank, key, buffer.data_ptr(), buffer.nbytes, exact)
        work = _Receive(self, end, tag, handle, buffer)
        self._receives.add(work)
        return work

    def add(self, peers: Mapping[int, End]) -> None:
        """Send to further `peers`, too, which are connected."""
        self._peers |= peers

    def close(self) -> None:
        """Abort what is under way, but for what the engine has: it is still sent."""
        self._closed = True
        if self._emulator is not None:
            self._emulator.close()
        for send in self._delayed:
            if not send.done():
                send.abort()
        for receive in list(self._receives):
            receive.abort()
        self._delayed = []
        self._open_ones.discard(self)

    def abort(self, end: End, handle: Work) -> None:
        """Give up a receive."""
        self._engine.abort(end.rank, handle)

    def forget(self, work: _Receive) -> None:
        """A receive is over."""
        self._receives.discard(work)

    def _open(self, peer: int, nbytes: int) -> End:
        end = self._peers[peer]
        if self._closed:
            raise PeerLost(f"{end.name}: this side has closed the transport")
        if nbytes >= self._large:
            self._endpoint.open_rails(end.rank)
        return end


class EngineWork(base.Work):
    """A send or a receive of `tag`, to or from `end`; `timeout`: see Work."""

    handle: Work  # of the engine; not there while a send is delayed
    _late: str  # what a timeout is called: seconds, tag and peer are filled in

    def __init__(self, end: End, tag: int, handle: Work | None = None) -> None:
        self._end, self._tag = end, tag
        self.stamps = Stamps(eager=True)
        if handle is not None:
            self.handle = handle

    def wait(self, timeout: float) -> Stamps:
        """Wait until all of it has arrived, also of a send."""
        return self._complete(timeout, timeout)

    def _complete(self, left: float, timeout: float) -> Stamps:
        """Wait `left` seconds, of `timeout` in all. Raises PeerLost."""
        if not self.handle.wait(max(0.0, left)):
            raise self._timed_out(timeout)
        if error := self.handle.error():
            raise PeerLost(f"{self._end.name}: {error}")
        if not self.stamps.completed:
            stamps = self.stamps
            stamps.sent, _, stamps.posted, stamps.completed = self.handle.stamps()
        return self.stamps

    def _timed_out(self, timeout: float) -> PeerLost:
        return PeerLost(self._late.format(timeout, self._tag, self._end.name))


class EngineSend(EngineWork):
    """A send with `tag`; `sent` is now, until the engine reports it."""

    _late = "waited {:g} s to send message {} to {}"

    def __init__(self, end: End, tag: int, handle: Work | None = None) -> None:
        super().__init__(end, tag, handle)
        self.stamps.sent = time.monotonic()


class EngineReceive(EngineWork):
    """A posted receive of `tag`."""

    _late = "waited {:g} s for message {} from {}"

    def __init__(self, end: End, tag: int, handle: Work) -> None:
        super().__init__(end, tag, handle)
        self.stamps.posted = time.monotonic()

    def done(self) -> bool:
        return self.handle.done()

    def wait(self, timeout: float) -> Stamps:
        if not self.stamps.wanted:
            self.stamps.wanted = time.monotonic()
        return super().wait(timeout)


class _Send(EngineSend):
    """A send that the engine has."""

    def done(self) -> bool:
        """Always: the engine has a copy."""
        return True

    def abort(self) -> None:
        """Nothing: what the engine has is sent."""


class _DelayedSend(EngineSend):
    """A send that the emulator delays."""

    def __init__(self, end: End, tag: int) -> None:
        super().__init__(end, tag)
        self._handed_over = threading.Event()  # to the engine, or aborted
        self._aborted = False

    def hand_over(self, handle: Work) -> None:
        """The engine has it now."""
        self.handle = handle
        self._handed_over.set()

    def done(self) -> bool:
        """Return True once it was handed to the engine, or aborted."""
        return self._handed_over.is_set()

    def wait(self, timeout: float) -> Stamps:
        end = time.monotonic() + timeout
        if not self._handed_over.wait(max(0.0, timeout)):
            raise self._timed_out(timeout)
        if self._aborted:
            raise PeerLost(f"{self._end.name}: aborted")
        return self._complete(end - time.monotonic(), timeout)

    def abort(self) -> None:
        """Give up, unless the engine has it: then it is sent."""
        if not self._handed_over.is_set():
            self._aborted = True
            self._handed_over.set()


class _Receive(EngineReceive):
    """The engine writes into the buffer, which is kept until the receive ends."""

    def __init__(
        self, owner: EngineTransport, end: End, tag: int, handle: Work, buffer: torch.Tensor
    ) -> None:
        super().__init__(end, tag, handle)
        self._owner, self._buffer = owner, buffer

    def wait(self, timeout: float) -> Stamps:
        super().wait(timeout)
        self._owner.forget(self)
        return self.stamps

    def abort(self) -> None:
        """Give up: nothing is written to the buffer after this."""
        self._owner.abort(self._end, self.handle)
        self._owner.forget(self)
