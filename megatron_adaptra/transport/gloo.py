"""Point to point over gloo, as torch.distributed has it.

Each directed link has a process group, and so a connection, of its own: no link queues behind
another. A message is a frame: the payload, then a trailer with the moment it was sent. A receive is
handed to the backend when it is posted and awaited by a thread of its link, so the moment of its
arrival is known even when compute asks for it much later, and a waiting rank can be interrupted.

Messages are in the host's memory; those of a GPU need our engine.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import PeerLost, reason_of
from megatron_adaptra.base.exits import at_exit, wait_at_exit
from megatron_adaptra.emulate.links import LinkEmulator
from megatron_adaptra.transport.base import Stamps, Traits, Transport, Work
from megatron_adaptra.transport.connect import connect
from megatron_adaptra.transport.descriptors import make_room

_TRAILER = struct.Struct("<8sqqd")  # magic, tag, payload bytes, seconds when sent
_MAGIC = b"adaptra1"
_NEVER_SENT = 2**31 - 1  # a tag
_LEAST = 0.001  # seconds; less than a millisecond means no deadline to gloo


@dataclass(frozen=True)
class GlooLink:
    """One direction of a link: its group, and the name of the other end."""

    group: Any  # a c10d backend of two ranks
    group_rank: int
    name: str  # of the peer, for errors: "stage 2 (rank 2)"


class GlooTransport(Transport):
    """Transport over one process group per directed link; peers are stages.

    `outgoing`, `incoming`: this rank's connections by peer (`open_links`).
    """

    traits = Traits("gloo", True, ("cpu",))  # gloo moves nothing before the receive is posted
    device = torch.device("cpu")

    def __init__(
        self,
        outgoing: Mapping[int, GlooLink],
        incoming: Mapping[int, GlooLink],
        emulator: LinkEmulator | None = None,
    ) -> None:
        self._out, self._emulator = dict(outgoing), emulator
        self._inboxes = {peer: _Inbox(link) for peer, link in incoming.items()}
        self._pool: dict[int, list[_Frame]] = {}
        self._delayed: list[_SendWork] = []  # by the emulator
        self._closed = False
        at_exit(self, GlooTransport.close)

    def isend(self, buffer: torch.Tensor, peer: int, tag: int) -> _SendWork:
        link = self._out[peer]
        self._refuse_closed(link)
        frame = self._frame(buffer.numel() * buffer.element_size())
        frame.pack(buffer, tag)
        work = _SendWork(self, link, frame, tag)
        if self._emulator is None:
            work.deliver()
        else:
            self._emulator.hold(peer, frame.nbytes, work.deliver)
            self._delayed = [w for w in self._delayed if not w.done()]
            self._delayed.append(work)
        return work

    def irecv(self, buffer: torch.Tensor, peer: int, tag: int) -> _ReceiveWork:
        inbox = self._inboxes[peer]
        self._refuse_closed(inbox.link)
        if not buffer.is_contiguous():
            raise ValueError(f"message {tag}: a receive needs contiguous memory")
        frame = self._frame(buffer.numel() * buffer.element_size())
        work = _ReceiveWork(self, inbox.link, frame, buffer, tag)
        inbox.post(work)
        return work

    @property
    def two_way(self) -> bool:
        """True where one connection serves both ways of a link."""
        return any(self._out.get(p) is inbox.link for p, inbox in self._inboxes.items())

    def add(self, outgoing: Mapping[int, GlooLink], incoming: Mapping[int, GlooLink]) -> None:
        """Use links with further peers, too, or new ones in place of those with a peer.

        What is under way on replaced links is lost. Raises PeerLost if this side is closed.
        """
        for peer, link in incoming.items():
            self._refuse_closed(link)
            if peer in self._inboxes:
                self._inboxes[peer].close()
            self._inboxes[peer] = _Inbox(link)
        self._out |= outgoing

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for inbox in self._inboxes.values():
            inbox.close()
        if self._emulator is not None:
            self._emulator.close()
        for work in self._delayed:
            if not work.done():
                work.abort()
        self._delayed, self._pool = [], {}
        # Without its groups: their connections close when nobody holds them any more.
        self._out = {peer: replace(link, group=None) for peer, link in self._out.items()}

    def _refuse_closed(self, link: GlooLink) -> None:
        if self._closed:
            raise PeerLost(f"{link.name}: this side has closed the transport")

    def _frame(self, nbytes: int) -> _Frame:
        try:  # several threads take from the pool
            return self._pool[nbytes].pop()
        except (KeyError, IndexError):
            return _Frame(nbytes)

    def recycle(self, frame: _Frame) -> None:
        """Take back a frame that the backend has let go of."""
        self._pool.setdefault(frame.nbytes, []).append(frame)


class _Frame:
    """Memory of the host for one message on the wire."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.wire = torch.empty(nbytes + _TRAILER.size, dtype=torch.uint8)
        self._address = self.wire.data_ptr()
        self._trailer = self.wire[nbytes:].numpy()

    def pack(self, payload: torch.Tensor, tag: int) -> None:
        whole = payload if payload.is_contiguous() else payload.detach().contiguous()
        # A tenth of the time of a torch copy, which small messages feel.
        ctypes.memmove(self._address, whole.data_ptr(), self.nbytes)
        _TRAILER.pack_into(self._trailer, 0, _MAGIC, tag, self.nbytes, time.monotonic())

    def unpack(self, payload: torch.Tensor, tag: int) -> float:
        """Copy the payload out; the moment it was sent. Raises PeerLost for a wrong message."""
        magic, got, nbytes, sent = _TRAILER.unpack_from(self._trailer)
        if (magic, got, nbytes) != (_MAGIC, tag, self.nbytes):
            raise PeerLost(
                f"awaited message {tag} of {self.nbytes} bytes, "
                f"got {magic!r} {got} of {nbytes} bytes"
            )
        ctypes.memmove(payload.data_ptr(), self._address, self.nbytes)
        return float(sent)


class _SendWork(Work):
    """A send: the frame belongs to the transport until the backend has let go of it."""

    def __init__(self, owner: GlooTransport, link: GlooLink, frame: _Frame, tag: int) -> None:
        self.stamps = Stamps(sent=time.monotonic())
        self._owner, self._link, self._frame, self._tag = owner, link, frame, tag
        self._delivered = threading.Lock()  # held until the backend has the message
        self._delivered.acquire()
        self._work: dist.Work | None = None
        self._error = ""

    def deliver(self) -> None:
        """Hand the frame to the backend; the emulator calls this when the time has come."""
        if self._error:
            return  # aborted meanwhile
        try:
            self._work = self._link.group.send([self._frame.wire], self._link.group_rank, self._tag)
        except RuntimeError as error:
            self._error = str(error)
        _unlock(self._delivered)

    def done(self) -> bool:
        """Return True once the backend has it; gloo cannot be asked for more without blocking."""
        return not self._delivered.locked()

    def wait(self, timeout: float) -> Stamps:
        deadline = time.monotonic() + timeout
        if not self._delivered.acquire(timeout=max(0.0, timeout)):
            raise PeerLost(f"waited {timeout:g} s to send message {self._tag} to {self._link.name}")
        _unlock(self._delivered)
        if not self._error and not self.stamps.completed:
            try:
                assert self._work is not None
                left = max(_LEAST, deadline - time.monotonic())
                self._work.wait(timedelta(seconds=left))
            except RuntimeError as error:
                self._error = str(error)
        if self._error:
            raise PeerLost(f"sending to {self._link.name}: {reason_of(self._error)}")
        if not self.stamps.completed:
            self.stamps.completed = time.monotonic()
            self._owner.recycle(self._frame)
        return self.stamps

    def abort(self) -> None:
        """Gloo does not let go of a wait for what it already has: that ends with its timeout."""
        self._error = self._error or "aborted"
        _unlock(self._delivered)


class _ReceiveWork(Work):
    """A posted receive. `wait` copies nothing: the link's thread has filled the buffer."""

    def __init__(
        self, owner: GlooTransport, link: GlooLink, frame: _Frame, buffer: torch.Tensor, tag: int
    ) -> None:
        self.stamps = Stamps(posted=time.monotonic())
        self._owner, self.link, self.frame, self._buffer, self.tag = owner, link, frame, buffer, tag
        self._arrival = threading.Lock()  # held until the message is there; cheaper than an Event
        self._arrival.acquire()
        self._error = ""

    def done(self) -> bool:
        return not self._arrival.locked()

    def wait(self, timeout: float) -> Stamps:
        if not self.stamps.wanted:
            self.stamps.wanted = time.monotonic()
        if not self._arrival.acquire(timeout=max(0.0, timeout)):
            raise PeerLost(f"waited {timeout:g} s for message {self.tag} from {self.link.name}")
        _unlock(self._arrival)
        if self._error:
            raise PeerLost(f"{self.link.name}: {reason_of(self._error)}")
        return self.stamps

    def arrived(self) -> None:
        """The backend has filled the frame (called by the link's thread)."""
        if self.done():
            return  # aborted: the buffer is its owner's again
        self.stamps.completed = time.monotonic()
        try:
            self.stamps.sent = self.frame.unpack(self._buffer, self.tag)
            self._owner.recycle(self.frame)
        except PeerLost as error:
            self._error = str(error)
        _unlock(self._arrival)

    def fail(self, error: str) -> None:
        if not self.done():
            self._error = error
            _unlock(self._arrival)

    def abort(self) -> None:
        self.fail("aborted")


class _Inbox:
    """The receiving end of a directed link, and the thread that awaits what is posted there."""

    def __init__(self, link: GlooLink) -> None:
        self.link = link
        self._posted: queue.SimpleQueue[tuple[_ReceiveWork, dist.Work] | None] = queue.SimpleQueue()
        self._open: set[_ReceiveWork] = set()
        self._thread = threading.Thread(
            target=self._run, name=f"adaptra-from-{link.name}", daemon=True
        )
        wait_at_exit(self._thread)
        self._thread.start()

    def post(self, work: _ReceiveWork) -> None:
        self._open.add(work)
        try:
            handle = self.link.group.recv([work.frame.wire], self.link.group_rank, work.tag)
        except RuntimeError as error:
            self._open.discard(work)
            work.fail(str(error))
            return
        self._posted.put((work, handle))

    def close(self) -> None:
        self._posted.put(None)
        if self._open:
            _hang_up(self.link)
        self._thread.join(timeout=1.0)  # a thread that gloo does not let go of is a daemon
        for work in list(self._open):
            work.abort()
        self.link = replace(self.link, group=None)

    def _run(self) -> None:
        while True:
            item = self._posted.get()
            if item is None:
                return
            work, handle = item
            try:
                # Deadlines are ours: gloo closes the connection when one of its own ends.
                handle.wait(timedelta(seconds=waits.FOREVER))
                work.arrived()
            except RuntimeError as error:
                work.fail(str(error))
            self._open.discard(work)


def open_links(
    ranks: Sequence[int],
    links: Sequence[tuple[int, int]],
    name: str,
    who: str = "stage",
    devices: Sequence[Any] = (),
    timeout: float | None = None,
    store: dist.Store | None = None,
) -> tuple[dict[int, GlooLink], dict[int, GlooLink]]:
    """One group per directed link of this rank, made by its two members alone.

    Args:
        ranks: global ranks by stage (or member).
        links: (source, target), as indices of `ranks`.
        name: keeps two sets of connections apart.
        who: what errors call an index of `ranks`.
        devices: gloo's, to share; then one connection serves both directions of a link.
        timeout: seconds for each peer to open its end (`waits.CONNECT`).
        store: for the addresses; torch's default one if None.

    Returns:
        The GlooLinks out of and into this rank, by peer.

    Raises:
        PeerLost: a peer, which it names, did not open its end in time.
    """
    timeout = waits.CONNECT if timeout is None else timeout
    me = dist.get_rank()
    store = store or dist.distributed_c10d._get_default_store()
    mine = [(s, t) for s, t in links if me in (ranks[s], ranks[t])]
    make_room(len(mine))
    outgoing: dict[int, GlooLink] = {}
    incoming: dict[int, GlooLink] = {}
    for source, target in mine:
        pair = (ranks[source], ranks[target])
        index = pair.index(me)
        prefix = dist.PrefixStore(f"adaptra/{name}/{pair[0]}>{pair[1]}", store)
        peer = target if index == 0 else source
        name_of_peer = f"{who} {peer} (rank {ranks[peer]})"
        try:
            group = connect(prefix, index, 2, timeout, devices)
        except RuntimeError as error:
            raise PeerLost(
                f"{name_of_peer}: no connection of kind {name!r} after {timeout:g} s: "
                f"{reason_of(error)}"
            ) from error
        link = GlooLink(group, 1 - index, name_of_peer)
        if devices or index == 0:
            outgoing[peer] = link
        if devices or index == 1:
            incoming[peer] = link
    return outgoing, incoming


def _unlock(gate: threading.Lock) -> None:
    """Release a lock that serves as a gate; it may be open already."""
    with contextlib.suppress(RuntimeError):
        gate.release()


def _hang_up(link: GlooLink) -> None:
    """Make the waits for what has not arrived on a link end with an error.

    gloo's abort leaves waits alone, but a wait that times out closes the connection.
    """
    with contextlib.suppress(RuntimeError):
        nothing = torch.empty(0, dtype=torch.uint8)
        work = link.group.recv([nothing], link.group_rank, _NEVER_SENT)
        work.wait(timedelta(milliseconds=1))
