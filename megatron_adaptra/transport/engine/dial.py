"""Calls of peers: connections over the network, or to processes of this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from megatron_adaptra.transport.engine.bindings import new_ring
from megatron_adaptra.transport.engine.handshake import ANSWER, Dialing, Identity, Kind, Refused
from megatron_adaptra.transport.engine.rails import Rail

if TYPE_CHECKING:
    from megatron_adaptra.transport.engine.bindings import Engine, VerbsPath

# Orders of paths: those of the lowest are used. A rail that is far from the GPU has one more.
ORDER_SHM, ORDER_VERBS, ORDER_TCP = 0, 1, 3
TRIAL = 100  # added to the order of a path that came back: the engine puts it on trial
_RAIL, _OUTCOME = struct.Struct("<I"), struct.Struct("<B63s")  # which one; refused, why
_CARD = 124  # bytes


@dataclass(frozen=True)
class Address:
    """Where a rank listens.

    `machine`: the same for processes that can share memory. `rails`: RDMA ports that it uses.
    """

    host: str
    port: int
    name: str
    machine: str
    rails: int = 0


def dial_tcp(
    engine: Engine, me: Identity, peer: int, at: Address, seconds: float, order: int
) -> int:
    """Open a path over the network to rank `peer`; return its number.

    `seconds`: that each step may take. `order`: of the path, see ORDER_TCP. Raises OSError,
    Refused, or RuntimeError for a failed encryption.
    """
    connection = socket.create_connection((at.host, at.port), seconds)
    with connection:
        key = _shake(connection, me, peer, Kind.TLS if me.encrypted else Kind.TCP)
        connection.settimeout(None)
        if me.encrypted:
            return engine.add_tls(peer, connection.detach(), order, key, True, seconds)
        return engine.add_tcp(peer, connection.detach(), order)


def ask_tcp(me: Identity, peer: int, at: Address, seconds: float) -> None:
    """Check that rank `peer` answers within `seconds`. Raises OSError or Refused if not."""
    with socket.create_connection((at.host, at.port), seconds) as connection:
        _shake(connection, me, peer, Kind.ASK)


def dial_shm(engine: Engine, me: Identity, peer: int, at: Address, seconds: float) -> int:
    """Open a path through memory to rank `peer`; return its number.

    The dialer makes the ring, and each side gives the other one its memory.
    `seconds`: that each step may take. Raises OSError, Refused, or RuntimeError of the engine.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(seconds)
        connection.connect(f"\0{at.name}")
        _shake(connection, me, peer, Kind.SHM)
        ring = new_ring()
        try:
            socket.send_fds(connection, [b"r"], [engine.arena_fd(), ring])
            (arena,) = _take_fds(connection, 1)
        except BaseException:
            os.close(ring)
            raise
        return engine.add_shm(peer, connection.detach(), ring, arena, True)


def answer_shm(engine: Engine, peer: int, connection: socket.socket, seconds: float) -> int:
    """Open the other end of `dial_shm`, on a `connection` whose dialer is proved to be `peer`.

    `seconds`: that each step may take.
    """
    with connection:
        connection.settimeout(seconds)
        arena, ring = _take_fds(connection, 2)
        try:
            socket.send_fds(connection, [b"a"], [engine.arena_fd()])
        except BaseException:
            os.close(arena)
            os.close(ring)
            raise
        return engine.add_shm(peer, connection.detach(), ring, arena, False)


def dial_verbs(
    engine: Engine, me: Identity, peer: int, at: Address, seconds: float,
    rail: Rail, number: int, order: int,
) -> int:  # fmt: skip
    """Open a path over RDMA from `rail` to rank `peer`'s rail `number`; return the path's number.

    `seconds`: that each step may take. `order`: of the path, see ORDER_VERBS. Raises OSError,
    Refused, or RuntimeError of the engine.
    """
    path = open_rail(engine, peer, rail)
    with socket.create_connection((at.host, at.port), seconds) as connection:
        _shake(connection, me, peer, Kind.VERBS)
        connection.sendall(_RAIL.pack(number) + path.card())
        _agreed(connection)
        _join(connection, path, _exactly(connection, _CARD))
        return _add_verbs(engine, peer, path, connection, order + rail.far)


def answer_verbs(
    engine: Engine, peer: int, connection: socket.socket, seconds: float,
    rails: Sequence[Rail], order: int,
) -> tuple[int, int]:  # fmt: skip
    """Open the other end of `dial_verbs`, with rank `peer`; return the numbers of path and rail.

    `seconds`: that each step may take. `order`: of the path, see ORDER_VERBS. Raises OSError,
    Refused, or RuntimeError of the engine.
    """
    with connection:
        connection.settimeout(seconds)
        (number,) = _RAIL.unpack(_exactly(connection, _RAIL.size))
        card = _exactly(connection, _CARD)
        with _reports_refusal(connection):
            if number >= len(rails):
                raise Refused(f"rail {number} of {len(rails)}")
            rail = rails[number]
            path = open_rail(engine, peer, rail)
        connection.sendall(_OUTCOME.pack(0, b"") + path.card())
        _join(connection, path, card)
        return _add_verbs(engine, peer, path, connection, order + rail.far), number


def open_rail(engine: Engine, peer: int, rail: Rail) -> VerbsPath:
    """Open a queue pair of `rail` to rank `peer`, unconnected. Raises the engine's RuntimeError."""
    at = (rail.device, rail.port, rail.gid, *rail.choice.words)
    return engine.open_verbs(peer, *at, *astuple(rail.service))


def _join(connection: socket.socket, path: VerbsPath, card: bytes) -> None:
    with _reports_refusal(connection):
        path.connect(card)
    connection.sendall(_OUTCOME.pack(0, b""))
    _agreed(connection)


def _add_verbs(
    engine: Engine, peer: int, path: VerbsPath, connection: socket.socket, order: int
) -> int:
    connection.settimeout(None)
    return engine.add_verbs(peer, path, connection.detach(), order)


@contextlib.contextmanager
def _reports_refusal(connection: socket.socket) -> Iterator[None]:
    """Send the other end the reason of a failure."""
    try:
        yield
    except (Refused, RuntimeError) as why:
        with contextlib.suppress(OSError):
            connection.sendall(_OUTCOME.pack(1, str(why).encode()[:63]))
        raise


def _agreed(connection: socket.socket) -> None:
    refused, why = _OUTCOME.unpack(_exactly(connection, _OUTCOME.size))
    if refused:
        raise Refused(f"the other side says: {why.rstrip(bytes(1)).decode(errors='replace')}")


def _shake(connection: socket.socket, me: Identity, peer: int, kind: Kind) -> bytes:
    dialing = Dialing(me, peer, kind)
    connection.sendall(dialing.hello)
    connection.sendall(dialing.prove(_exactly(connection, ANSWER)))
    dialing.end(_exactly(connection, ANSWER))
    return dialing.key


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
