"""Answers connections, in one thread, and passes on those of the job's ranks.

Strangers are dropped: of those who have not proved who they are there are some hundred at a time,
each for a few seconds and of some hundred bytes; when there are more the oldest goes. Every one
has its place for a moment at least, also if it hangs up: so those of the job get through a crowd,
and however many come, they take little of the processor.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from megatron_adaptra.transport.engine.handshake import Answering, Identity, Kind, Refused, refusal

PATIENCE = 5.0  # seconds for a handshake
MOST = 128  # connections without a proof
_BACKLOG = 1024
GRACE = 0.25  # seconds that every stranger has its place, also after it is gone
_BREATH = 0.1  # seconds until another connection is tried where there was no descriptor

Accepted = Callable[[Answering, socket.socket], None]
Strange = Callable[[str], None]


@dataclass
class _Caller:
    name: str  # where it is
    socket: socket.socket
    answering: Answering
    since: float
    until: float
    data: bytearray = field(default_factory=bytearray)


class Listener:
    """Listens at an address of `host` and, for processes of this machine, at a name.

    `accepted`: called in the thread with a connection that belongs to the job, which it takes over;
    it blocks again. `strange`: called with who was dropped, and why. `port`, `name`: where others
    find it.
    """

    def __init__(self, me: Identity, host: str, accepted: Accepted, strange: Strange) -> None:
        self._me, self._accepted, self._strange = me, accepted, strange
        self.name = f"adaptra-{secrets.token_hex(8)}"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._sockets = [
            socket.create_server((host, 0), family=family, backlog=_BACKLOG),
            socket.socket(socket.AF_UNIX),
        ]
        self._sockets[1].bind(f"\0{self.name}")  # no file; known inside a network namespace
        self._sockets[1].listen(_BACKLOG)
        self.port = int(self._sockets[0].getsockname()[1])
        self._kept: list[float] = []  # until when, places of those who are gone
        self._lets_in = False
        self._callers: dict[int, _Caller] = {}  # by descriptor, the oldest first
        self._wake, self._woken = os.pipe()
        self._selector = selectors.DefaultSelector()
        for one in self._sockets:
            one.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="adaptra-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and close everything that was not handed over."""
        os.write(self._woken, b"x")
        self._thread.join(PATIENCE)
        for one in (*self._sockets, *(c.socket for c in self._callers.values())):
            one.close()
        self._selector.close()
        os.close(self._wake)
        os.close(self._woken)

    def _run(self) -> None:
        while True:
            now = time.monotonic()
            place = self._next_place(now)
            self._let_in(place <= now)
            times = [caller.until for caller in self._oldest()]
            times += [place] if place > now else []
            for key, _ in self._selector.select(min(times) - now if times else None):
                if key.fd == self._wake:
                    return
                if key.data is not None:
                    self._accept(key.data)
                elif key.fd in self._callers:
                    self._read(self._callers[key.fd])
            now = time.monotonic()
            for late in [c for c in self._callers.values() if c.until <= now]:
                self._drop(late, f"it did not end its handshake in {PATIENCE:g} s")

    def _next_place(self, now: float) -> float:
        """When another caller may come in."""
        self._kept = [until for until in self._kept if until > now]
        if len(self._callers) + len(self._kept) < MOST:
            return now
        return min([*self._kept, *(caller.since + GRACE for caller in self._oldest())])

    def _oldest(self) -> list[_Caller]:
        """One, or none."""
        return list(islice(self._callers.values(), 1))

    def _let_in(self, yes: bool) -> None:
        """Others wait in the kernel's queue."""
        if yes != self._lets_in:
            self._lets_in = yes
            for one in self._sockets:
                if yes:
                    self._selector.register(one, selectors.EVENT_READ, one)
                else:
                    self._selector.unregister(one)

    def _accept(self, server: socket.socket) -> None:
        try:
            connection, address = server.accept()
        except (BlockingIOError, ConnectionError):  # it has gone again
            return
        except OSError:  # there are no descriptors left
            time.sleep(_BREATH)
            return
        connection.setblocking(False)
        name = str(address[0]) if address else "a process of this machine"
        now = time.monotonic()
        caller = _Caller(name, connection, Answering(self._me), now, now + PATIENCE)
        self._callers[connection.fileno()] = caller
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._callers) + len(self._kept) > MOST:
            self._drop(self._oldest()[0], "it was silent, and others came")

    def _read(self, caller: _Caller) -> None:
        answering = caller.answering
        if answering.peer is not None:
            return self._hand_over(caller)
        try:
            got = caller.socket.recv(answering.needs - len(caller.data))
            caller.data += got
            if not got:
                self._drop(caller, "it hung up")
            elif len(caller.data) == answering.needs:
                message, caller.data = bytes(caller.data), bytearray()
                caller.socket.sendall(
                    answering.receive(message)
                )  # it fits the socket's empty buffer
                # Through memory the caller sends more: it is handed over once that is there.
                if answering.peer is not None and answering.kind is not Kind.SHM:
                    self._hand_over(caller)
        except BlockingIOError:
            pass
        except Refused as why:
            with contextlib.suppress(OSError):
                caller.socket.sendall(refusal(str(why)))
            self._drop(caller, str(why))
        except OSError as error:
            self._drop(caller, str(error))

    def _hand_over(self, caller: _Caller) -> None:
        self._release(caller)
        caller.socket.setblocking(True)
        try:
            self._accepted(caller.answering, caller.socket)
        except (OSError, RuntimeError):  # it broke, or its limits do not allow it: it comes again
            caller.socket.close()

    def _release(self, caller: _Caller) -> None:
        self._selector.unregister(caller.socket)
        del self._callers[caller.socket.fileno()]

    def _drop(self, caller: _Caller, why: str) -> None:
        self._release(caller)
        caller.socket.close()
        self._kept.append(caller.since + GRACE)
        self._strange(f"{caller.name}: {why}")
