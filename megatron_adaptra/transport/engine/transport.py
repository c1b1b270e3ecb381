"""Messages over the endpoint, as the rest of the package knows them (transport/base.py)."""

from __future__ import annotations

import ctypes
import hashlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron_adaptra.errors import PeerLost
from megatron_adaptra.transport.base import Stamps, Traits
from megatron_adaptra.transport.emulate import LinkEmulator
from megatron_adaptra.transport.engine.endpoint import Endpoint
from megatron_adaptra.transport.engine.native import Work


@dataclass(frozen=True)
class End:
    """A peer of a transport: its global rank, and its name in errors."""

    rank: int
    name: str


def lane_of(name: str) -> int:
    """What stands before the tags of a transport's messages. `name`: see EngineTransport."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") << 32


class EngineTransport:
    """Transport over a process's `endpoint`, which it shares with others.

    `name`: the same at both ends; messages of different names never meet. `peers`: whom the rest of
    the package calls by which number; they are connected. `tag`: see Transport.
    """

    traits = Traits("engine", False, ("cpu",))
    device = torch.device("cpu")

    def __init__(
        self,
        endpoint: Endpoint,
        name: str,
        peers: Mapping[int, End],
        emulator: LinkEmulator | None = None,
    ) -> None:
        self._engine, self._peers, self._emulator = endpoint.engine, dict(peers), emulator
        self._lane = lane_of(name)
        self._receives: set[_Receive] = set()  # that have not been waited for
        self._held: list[_HeldSend] = []  # by the emulator
        self._closed = False
        self._open_ones = endpoint.transports
        self._open_ones.add(self)

    def registered(self, nbytes: int) -> torch.Tensor:
        """`nbytes` of the engine's memory.

        A send from its first byte on copies nothing: it may change only when that has ended.
        """
        return torch.frombuffer(self._engine.take(nbytes), dtype=torch.uint8)

    def isend(self, buffer: torch.Tensor, peer: int, tag: int) -> _Send | _HeldSend:
        """As for Transport, with `tag`. Raises PeerLost if this side is closed."""
        end = self._open(peer)
        payload = buffer if buffer.is_contiguous() else buffer.detach().contiguous()
        nbytes, key = payload.nbytes, self._lane | tag
        if self._emulator is None or not self._emulator.holds(peer):
            return _Send(end, tag, self._engine.send(end.rank, key, payload.data_ptr(), nbytes))
        work = _HeldSend(end, tag)
        block = self._engine.take(nbytes)
        ctypes.memmove(block.address, payload.data_ptr(), nbytes)

        def deliver() -> None:
            if not work.done():  # else it was aborted
                ready = work.stamps.sent
                work.hand_over(self._engine.send(end.rank, key, block.address, nbytes, ready))

        self._held = [w for w in self._held if not w.done()]
        self._held.append(work)
        self._emulator.hold(peer, nbytes, deliver)
        return work

    def irecv(self, buffer: torch.Tensor, peer: int, tag: int, exact: bool = True) -> _Receive:
        """As for Transport, with `tag`. Raises PeerLost if this side is closed.

        ValueError is for memory that is not contiguous. Not `exact`: the message may be shorter
        than the buffer.
        """
        end = self._open(peer)
        if not buffer.is_contiguous():
            raise ValueError(f"message {tag}: a receive needs contiguous memory")
        key = self._lane | tag
        handle = self._engine.receive(end.rank, key, buffer.data_ptr(), buffer.nbytes, exact)
        work = _Receive(self, end, tag, handle, buffer)
        self._receives.add(work)
        return work

    def close(self) -> None:
        """Give up what is still to come, and what is held back."""
        self._closed = True
        if self._emulator is not None:
            self._emulator.close()
        for send in self._held:
            if not send.done():
                send.abort()
        for receive in list(self._receives):
            receive.abort()
        self._held = []
        self._open_ones.discard(self)

    def abort(self, end: End, handle: Work) -> None:
        """Give up a receive."""
        self._engine.abort(end.rank, handle)

    def forget(self, work: _Receive) -> None:
        """A receive is over."""
        self._receives.discard(work)

    def _open(self, peer: int) -> End:
        end = self._peers[peer]
        if self._closed:
            raise PeerLost(f"{end.name}: this side has closed the transport")
        return end


class EngineWork:
    """What sends and receives have in common: with whom (`end`), and the `tag`."""

    handle: Work  # of the engine; not there while a send is held back

    def __init__(self, end: End, tag: int) -> None:
        self._end, self._tag = end, tag
        self.stamps = Stamps(eager=True)

    def _ended(self, timeout: float) -> bool:
        """Whether it is over in time; then the stamps are known. Raises PeerLost for a failure."""
        if not self.handle.wait(max(0.0, timeout)):
            return False
        if error := self.handle.error():
            raise PeerLost(f"{self._end.name}: {error}")
        if not self.stamps.completed:
            sent, _, posted, completed = self.handle.stamps()
            self.stamps.sent, self.stamps.posted = sent, posted
            self.stamps.completed = completed
        return True


class _Send(EngineWork):
    """A send that the engine has."""

    def __init__(self, end: End, tag: int, handle: Work) -> None:
        super().__init__(end, tag)
        self.stamps.sent = time.monotonic()
        self.handle = handle

    def done(self) -> bool:
        """Always: the engine has a copy."""
        return True

    def wait(self, timeout: float) -> Stamps:
        """As for Work: until all of it has arrived."""
        if not self._ended(timeout):
            raise PeerLost(f"waited {timeout:g} s to send message {self._tag} to {self._end.name}")
        return self.stamps

    def abort(self) -> None:
        """Nothing: what the engine has is sent."""


class _HeldSend(EngineWork):
    """A send that the emulator holds back."""

    def __init__(self, end: End, tag: int) -> None:
        super().__init__(end, tag)
        self.stamps.sent = time.monotonic()
        self.held = threading.Event()  # set when the engine has it
        self._aborted = False

    def hand_over(self, handle: Work) -> None:
        """The engine has it now."""
        self.handle = handle
        self.held.set()

    def done(self) -> bool:
        """Whether it was handed to the engine, or given up."""
        return self.held.is_set()

    def wait(self, timeout: float) -> Stamps:
        """As for Work: until all of it has arrived."""
        end = time.monotonic() + timeout
        if not self.held.wait(max(0.0, timeout)):
            raise PeerLost(f"waited {timeout:g} s to send message {self._tag} to {self._end.name}")
        if self._aborted:
            raise PeerLost(f"{self._end.name}: aborted")
        if not self._ended(end - time.monotonic()):
            raise PeerLost(f"waited {timeout:g} s to send message {self._tag} to {self._end.name}")
        return self.stamps

    def abort(self) -> None:
        """Whoever waits gets PeerLost; what the engine has is sent."""
        if not self.held.is_set():
            self._aborted = True
            self.held.set()


class _Receive(EngineWork):
    """A posted receive; the engine writes into the buffer, which is kept until it ends."""

    def __init__(
        self, owner: EngineTransport, end: End, tag: int, handle: Work, buffer: torch.Tensor
    ) -> None:
        super().__init__(end, tag)
        self.handle = handle
        self.stamps.posted = time.monotonic()
        self._owner, self._buffer = owner, buffer

    def done(self) -> bool:
        """Whether the message is there, or will not come."""
        return self.handle.done()

    def wait(self, timeout: float) -> Stamps:
        """As for Work."""
        if not self.stamps.wanted:
            self.stamps.wanted = time.monotonic()
        if not self._ended(timeout):
            raise PeerLost(f"waited {timeout:g} s for message {self._tag} from {self._end.name}")
        self._owner.forget(self)
        return self.stamps

    def abort(self) -> None:
        """Whoever waits gets PeerLost; nothing is written to the buffer after this."""
        self._owner.abort(self._end, self.handle)
        self._owner.forget(self)
