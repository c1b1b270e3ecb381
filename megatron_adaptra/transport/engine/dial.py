"""Calls a peer: a connection over the network, or to a process of this machine."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from megatron_adaptra.transport.engine.handshake import ANSWER, Dialing, Identity, Kind, Refused
from megatron_adaptra.transport.engine.native import Engine, new_ring

ORDER_TCP = 2  # of paths; those of the lowest order are used
TRIAL = 100  # added while a path that came back is on trial
_EVENTS = 3  # descriptors that go with the dialer's memory: the ring, and two counters


@dataclass(frozen=True)
class Address:
    """Where a rank listens. `machine`: the same for processes that can share memory."""

    host: str
    port: int
    name: str
    machine: str


def dial_tcp(
    engine: Engine, me: Identity, peer: int, at: Address, seconds: float, order: int
) -> int:
    """A path over the network to rank `peer`; its number. Raises OSError or Refused.

    `seconds`: that each step may take. `order`: of the path, see ORDER_TCP.
    """
    connection = socket.create_connection((at.host, at.port), seconds)
    with connection:
        _shake(connection, me, peer, Kind.TCP)
        connection.settimeout(None)
        return engine.add_tcp(peer, connection.detach(), order)


def ask_tcp(me: Identity, peer: int, at: Address, seconds: float) -> None:
    """Whether rank `peer` answers within `seconds`. Raises OSError or Refused if not."""
    with socket.create_connection((at.host, at.port), seconds) as connection:
        _shake(connection, me, peer, Kind.ASK)


def dial_shm(engine: Engine, me: Identity, peer: int, at: Address, seconds: float) -> int:
    """A path through memory to rank `peer`; its number.

    The dialer makes the ring and the counters, and each side gives the other one its memory.
    `seconds`: that each step may take. Raises OSError, Refused, or RuntimeError of the engine.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(seconds)
        connection.connect(f"\0{at.name}")
        _shake(connection, me, peer, Kind.SHM)
        ring = new_ring()
        mine, theirs = (os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2))
        try:
            given = [engine.arena_fd(), ring, theirs, mine]
            socket.send_fds(connection, [b"r"], given)
            (arena,) = _take_fds(connection, 1)
        except BaseException:
            for fd in (ring, mine, theirs):
                os.close(fd)
            raise
        connection.settimeout(None)
        return engine.add_shm(peer, connection.detach(), ring, mine, theirs, arena, True)


def answer_shm(engine: Engine, peer: int, connection: socket.socket, seconds: float) -> int:
    """The other end of `dial_shm`: on a `connection` whose dialer has proved that it is `peer`.

    `seconds`: that each step may take.
    """
    with connection:
        connection.settimeout(seconds)
        arena, ring, mine, theirs = _take_fds(connection, 1 + _EVENTS)
        try:
            socket.send_fds(connection, [b"a"], [engine.arena_fd()])
        except BaseException:
            for fd in (arena, ring, mine, theirs):
                os.close(fd)
            raise
        connection.settimeout(None)
        return engine.add_shm(peer, connection.detach(), ring, mine, theirs, arena, False)


def _shake(connection: socket.socket, me: Identity, peer: int, kind: Kind) -> None:
    dialing = Dialing(me, peer, kind)
    connection.sendall(dialing.hello)
    connection.sendall(dialing.take(_exactly(connection, ANSWER)))
    dialing.end(_exactly(connection, ANSWER))


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        got = connection.recv(count - len(data))
        if not got:
            raise Refused("it hung up")
        data += got
    return bytes(data)


def _take_fds(connection: socket.socket, count: int) -> list[int]:
    _, fds, _, _ = socket.recv_fds(connection, 1, count)
    for fd in fds:
        os.set_inheritable(fd, False)
    if len(fds) != count:
        for fd in fds:
            os.close(fd)
        raise OSError(f"{len(fds)} descriptors came instead of {count}")
    return fds
