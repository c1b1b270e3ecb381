"""Ranks as threads of one process: the whole Transport contract without a network, for tests.

With `rendezvous` a message starts when its receive has been posted and the word of that has
travelled back, as with gloo; `delay` is per directed pair, in seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from megatron_adaptra.base.errors import PeerLost
from megatron_adaptra.emulate.links import DelayLine
from megatron_adaptra.transport.base import Buffer, Stamps, Traits

_Key = tuple[int, int, int]  # source, target, tag


class LoopbackNetwork:
    """What the ranks of one test share.

    `rendezvous`: nothing moves before the receive is posted. `delay`: seconds, by
    source and target.
    """

    def __init__(
        self, rendezvous: bool = False, delay: Mapping[tuple[int, int], float] | None = None
    ) -> None:
        self.rendezvous, self.delay = rendezvous, dict(delay or {})
        self.lock = threading.Lock()
        self.sends: dict[_Key, _LoopbackWork] = {}
        self.receives: dict[_Key, _LoopbackWork] = {}
        self.line = DelayLine()

    def open(self, rank: int) -> LoopbackTransport:
        """The Transport of `rank`."""
        return LoopbackTransport(self, rank)

    def close(self) -> None:
        """Drop what is on its way, and end the thread."""
        self.line.close()

    def match(self, key: _Key) -> None:
        """Both sides are there: move the bytes when the link has had its time. Lock held."""
        send, receive = self.sends.pop(key), self.receives.pop(key)
        source, target, _ = key
        start = send.stamps.sent
        if self.rendezvous:
            start = max(start, receive.stamps.posted + self.delay.get((target, source), 0.0))
        due = start + self.delay.get((source, target), 0.0)
        self.line.put(due, lambda: _move(send, receive))


def _move(send: _LoopbackWork, receive: _LoopbackWork) -> None:
    if receive.done():
        return  # aborted: the buffer is its owner's again
    target = _bytes(receive.payload)
    if len(target) != len(send.payload):
        receive.fail(f"a message of {len(send.payload)} bytes, room for {len(target)}")
        return
    target[:] = send.payload
    receive.stamps.sent = send.stamps.sent
    send.complete()
    receive.complete()


def _bytes(buffer: Buffer) -> memoryview:
    """The memory of a contiguous buffer."""
    if isinstance(buffer, torch.Tensor):
        return memoryview(buffer.detach().view(-1).view(torch.uint8).numpy())
    return memoryview(buffer).cast("B")


@dataclass(eq=False)
class _LoopbackWork:
    what: str
    payload: Buffer
    stamps: Stamps
    forget: Callable[[], None]
    event: threading.Event = field(default_factory=threading.Event)
    error: str = ""

    def done(self) -> bool:
        return self.event.is_set()

    def wait(self, timeout: float) -> Stamps:
        self.stamps.wanted = self.stamps.wanted or time.monotonic()
        if not self.event.wait(timeout):
            raise PeerLost(f"waited {timeout:g} s for {self.what}")
        if self.error:
            raise PeerLost(f"{self.what}: {self.error}")
        return self.stamps

    def abort(self) -> None:
        self.fail("aborted")

    def fail(self, error: str) -> None:
        if not self.event.is_set():
            self.forget()
            self.error = error
            self.event.set()

    def complete(self) -> None:
        self.stamps.completed = time.monotonic()
        self.event.set()


class LoopbackTransport:
    """The Transport of one `rank`; peers are ranks."""

    def __init__(self, network: LoopbackNetwork, rank: int) -> None:
        self.network, self.rank = network, rank
        self.traits = Traits("loopback", network.rendezvous, ("cpu",))
        self._open: list[_LoopbackWork] = []
        self._closed = False

    def isend(self, buffer: Buffer, peer: int, tag: int) -> _LoopbackWork:
        """As for Transport, to `peer` with `tag`. Raises PeerLost if this side is closed."""
        key = (self.rank, peer, tag)
        if isinstance(buffer, torch.Tensor):
            buffer = buffer.detach().contiguous()
        payload = bytes(_bytes(buffer))
        stamps = Stamps(sent=time.monotonic())
        what = f"the receiver {peer} of message {tag}"
        return self._put(key, _LoopbackWork(what, payload, stamps, lambda: None), sending=True)

    def irecv(self, buffer: Buffer, peer: int, tag: int) -> _LoopbackWork:
        """As for Transport, from `peer` with `tag`.

        Raises PeerLost if this side is closed, ValueError for memory that is not contiguous.
        """
        key = (peer, self.rank, tag)
        if isinstance(buffer, torch.Tensor) and not buffer.is_contiguous():
            raise ValueError(f"message {tag}: a receive needs contiguous memory")
        stamps = Stamps(posted=time.monotonic())
        what = f"message {tag} from {peer}"
        return self._put(key, _LoopbackWork(what, buffer, stamps, lambda: None), sending=False)

    def _put(self, key: _Key, work: _LoopbackWork, sending: bool) -> _LoopbackWork:
        network = self.network
        mine = network.sends if sending else network.receives
        other = network.receives if sending else network.sends

        def forget() -> None:
            with network.lock:
                if mine.get(key) is work:
                    del mine[key]

        work.forget = forget
        if self._closed:
            raise PeerLost(f"{work.what}: this side has closed the transport")
        with network.lock:
            if key in mine:
                raise ValueError(f"tag {key[2]} is already under way from {key[0]} to {key[1]}")
            mine[key] = work
            if key in other:
                network.match(key)
            self._open = [w for w in self._open if not w.done()]
            self._open.append(work)
        return work

    def close(self) -> None:
        """As for Transport."""
        self._closed = True
        for work in self._open:
            work.abort()
        self._open = []
