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

from megatron_adaptra import waits
from megatron_adaptra.errors import PeerLost, reason_of
from megatron_adaptra.exits import at_exit, wait_at_exit
from megatron_adaptra.transport.base import Stamps, Traits
from megatron_adaptra.transport.connect import connect
from megatron_adaptra.transport.descriptors import make_room
from megatron_adaptra.transport.emulate import LinkEmulator

_TRAILER = struct.Struct("<8sqqd")  # magic, tag, payload bytes, seconds when sent
_MAGIC = b"adaptra1"
_NEVER_SENT = 2**31 - 1  # a tag
_LEAST = 0.001  # seconds; less than a millisecond means no deadline to gloo


@dataclass(frozen=True)
class Lane:
    """One direction of a link: its group, and who is at the other end."""

    group: Any  # a c10d backend of two ranks
    group_rank: int
    name: str  # of the peer, for errors: "stage 2 (rank 2)"


class GlooTransport:
    """Transport over one process group per directed link; peers are stages.

    `outgoing`, `incoming`: the lanes of this rank by peer (`open_lanes`).
    """

    traits = Traits("gloo", True, ("cpu",))  # gloo moves nothing before the receive is posted
    device = torch.device("cpu")

    def __init__(
        self,
        outgoing: Mapping[int, Lane],
        incoming: Mapping[int, Lane],
        emulator: LinkEmulator | None = None,
    ) -> None:
        self._out, self._emulator = dict(outgoing), emulator
        self._inboxes = {peer: _Inbox(lane) for peer, lane in incoming.items()}
        self._pool: dict[int, list[_Frame]] = {}
        self._held: list[_SendWork] = []  # by the emulator
        self._closed = False
        at_exit(self, GlooTransport.close)

    def isend(self, buffer: torch.Tensor, peer: int, tag: int) -> _SendWork:
        """As for Transport, to `peer` with `tag`. Raises PeerLost if this side is closed."""
        lane = self._out[peer]
        self._refuse_closed(lane)
        frame = self._frame(buffer.numel() * buffer.element_size())
        frame.pack(buffer, tag)
        work = _SendWork(self, lane, frame, tag)
        if self._emulator is None:
            work.deliver()
        else:
            self._emulator.hold(peer, frame.nbytes, work.deliver)
            self._held = [w for w in self._held if not w.done()]
            self._held.append(work)
        return work

    def irecv(self, buffer: torch.Tensor, peer: int, tag: int) -> _ReceiveWork:
        """As for Transport, from `peer` with `tag`.

        Raises PeerLost if this side is closed, ValueError for memory that is not contiguous.
        """
        inbox = self._inboxes[peer]
        self._refuse_closed(inbox.lane)
        if not buffer.is_contiguous():
            raise ValueError(f"message {tag}: a receive needs contiguous memory")
        frame = self._frame(buffer.numel() * buffer.element_size())
        work = _ReceiveWork(self, inbox.lane, frame, buffer, tag)
        inbox.post(work)
        return work

    def replace(
        self, peer: int, outgoing: Mapping[int, Lane], incoming: Mapping[int, Lane]
    ) -> None:
        """From now on use new lanes to and from `peer`; what is under way on the old ones is lost.

        Raises PeerLost if this side is closed.
        """
        self._refuse_closed(incoming[peer])
        self._inboxes[peer].close()
        self._inboxes[peer] = _Inbox(incoming[peer])
        self._out[peer] = outgoing[peer]

    def close(self) -> None:
        """Abort what is under way and end the threads."""
        if self._closed:
            return
        self._closed = True
        for inbox in self._inboxes.values():
            inbox.close()
        if self._emulator is not None:
            self._emulator.close()
        for work in self._held:
            if not work.done():
                work.abort()
        self._held, self._pool = [], {}
        # Without its groups: their connections close when nobody holds them any more.
        self._out = {peer: replace(lane, group=None) for peer, lane in self._out.items()}

    def _refuse_closed(self, lane: Lane) -> None:
        if self._closed:
            raise PeerLost(f"{lane.name}: this side has closed the transport")

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


class _SendWork:
    """A send: the frame belongs to the transport until the backend has let go of it."""

    def __init__(self, owner: GlooTransport, lane: Lane, frame: _Frame, tag: int) -> None:
        self.stamps = Stamps(sent=time.monotonic())
        self._owner, self._lane, self._frame, self._tag = owner, lane, frame, tag
        self._delivered = threading.Lock()  # held until the backend has the message
        self._delivered.acquire()
        self._work: dist.Work | None = None
        self._error = ""

    def deliver(self) -> None:
        """Hand the frame to the backend; the emulator calls this when the time has come."""
        if self._error:
            return  # aborted meanwhile
        try:
            self._work = self._lane.group.send([self._frame.wire], self._lane.group_rank, self._tag)
        except RuntimeError as error:
            self._error = str(error)
        _unlock(self._delivered)

    def done(self) -> bool:
        """Whether the backend has the message; gloo cannot be asked for more without blocking."""
        return not self._delivered.locked()

    def wait(self, timeout: float) -> Stamps:
        deadline = time.monotonic() + timeout
        if not self._delivered.acquire(timeout=max(0.0, timeout)):
            raise PeerLost(f"waited {timeout:g} s to send message {self._tag} to {self._lane.name}")
        _unlock(self._delivered)
        if not self._error and not self.stamps.completed:
            try:
                assert self._work is not None
                left = max(_LEAST, deadline - time.monotonic())
                self._work.wait(timedelta(seconds=left))
            except RuntimeError as error:
                self._error = str(error)
        if self._error:
            raise PeerLost(f"sending to {self._lane.name}: {reason_of(self._error)}")
        if not self.stamps.completed:
            self.stamps.completed = time.monotonic()
            self._owner.recycle(self._frame)
        return self.stamps

    def abort(self) -> None:
        """Gloo does not let go of a wait for what it already has: that ends with its timeout."""
        self._error = self._error or "aborted"
        _unlock(self._delivered)


class _ReceiveWork:
    """A posted receive. `wait` copies nothing: the link's thread has filled the buffer."""

    def __init__(
        self, owner: GlooTransport, lane: Lane, frame: _Frame, buffer: torch.Tensor, tag: int
    ) -> None:
        self.stamps = Stamps(posted=time.monotonic())
        self._owner, self.lane, self.frame, self._buffer, self.tag = owner, lane, frame, buffer, tag
        self._arrival = threading.Lock()  # held until the message is there; cheaper than an Event
        self._arrival.acquire()
        self._error = ""

    def done(self) -> bool:
        return not self._arrival.locked()

    def wait(self, timeout: float) -> Stamps:
        if not self.stamps.wanted:
            self.stamps.wanted = time.monotonic()
        if not self._arrival.acquire(timeout=max(0.0, timeout)):
            raise PeerLost(f"waited {timeout:g} s for message {self.tag} from {self.lane.name}")
        _unlock(self._arrival)
        if self._error:
            raise PeerLost(f"{self.lane.name}: {reason_of(self._error)}")
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

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._posted: queue.SimpleQueue[tuple[_ReceiveWork, dist.Work] | None] = queue.SimpleQueue()
        self._open: set[_ReceiveWork] = set()
        self._thread = threading.Thread(
            target=self._run, name=f"adaptra-from-{lane.name}", daemon=True
        )
        wait_at_exit(self._thread)
        self._thread.start()

    def post(self, work: _ReceiveWork) -> None:
        self._open.add(work)
        try:
            handle = self.lane.group.recv([work.frame.wire], self.lane.group_rank, work.tag)
        except RuntimeError as error:
            self._open.discard(work)
            work.fail(str(error))
            return
        self._posted.put((work, handle))

    def close(self) -> None:
        self._posted.put(None)
        if self._open:
            _hang_up(self.lane)
        self._thread.join(timeout=1.0)  # a thread that gloo does not let go of is a daemon
        for work in list(self._open):
            work.abort()
        self.lane = replace(self.lane, group=None)

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


def open_lanes(
    ranks: Sequence[int],
    links: Sequence[tuple[int, int]],
    name: str,
    who: str = "stage",
    devices: Sequence[Any] = (),
    timeout: float | None = None,
    store: dist.Store | None = None,
) -> tuple[dict[int, Lane], dict[int, Lane]]:
    """One group per directed link in `links` (source stage, target stage) of those on `ranks`.

    Returns the lanes out of and into this rank, by peer stage. The groups are made by their two
    members alone, over `store` (torch's default one); `name` keeps two sets of lanes apart. `who`:
    what errors call an index of `ranks`. `devices`: to share; then a link serves both directions,
    with one connection. Raises PeerLost, which names it, if a peer does not come in `timeout`
    seconds (`waits.CONNECT`).
    """
    timeout = waits.CONNECT if timeout is None else timeout
    me = dist.get_rank()
    store = store or dist.distributed_c10d._get_default_store()
    mine = [(s, t) for s, t in links if me in (ranks[s], ranks[t])]
    make_room(len(mine))
    outgoing: dict[int, Lane] = {}
    incoming: dict[int, Lane] = {}
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
        lane = Lane(group, 1 - index, name_of_peer)
        if devices or index == 0:
            outgoing[peer] = lane
        if devices or index == 1:
            incoming[peer] = lane
    return outgoing, incoming


def _unlock(gate: threading.Lock) -> None:
    """Let through whoever waits at a lock that serves as a gate; it may be open already."""
    with contextlib.suppress(RuntimeError):
        gate.release()


def _hang_up(lane: Lane) -> None:
    """Make the waits for what has not arrived on a lane end with an error.

    gloo's abort leaves waits alone, but a wait that times out closes the connection.
    """
    with contextlib.suppress(RuntimeError):
        nothing = torch.empty(0, dtype=torch.uint8)
        work = lane.group.recv([nothing], lane.group_rank, _NEVER_SENT)
        work.wait(timedelta(milliseconds=1))
