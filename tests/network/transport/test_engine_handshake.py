"""Who does not know the job's secret gets nothing, and costs next to nothing."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from patience import PATIENCE, longer_and_longer
from seeding import new_seed
from transport.ranks import until

from megatron_adaptra.transport.engine import listener as listening
from megatron_adaptra.transport.engine.bindings import new_engine
from megatron_adaptra.transport.engine.dial import Address, answer_shm, ask_tcp
from megatron_adaptra.transport.engine.endpoint import SILENCE
from megatron_adaptra.transport.engine.handshake import (
    ANSWER,
    HELLO,
    PROOF,
    Answering,
    Dialing,
    Identity,
    Kind,
    Refused,
)
from megatron_adaptra.transport.engine.listener import Listener

A, B = (Identity(rank, b"s" * 32, 1 << 20, 1 << 16) for rank in (0, 1))


def shake(dialler: Identity, answerer: Identity, kind: Kind = Kind.TCP) -> Answering:
    dialing, answering = Dialing(dialler, A.rank, kind), Answering(answerer)
    assert len(dialing.hello) == answering.needs == HELLO
    first = answering.receive(dialing.hello)
    proof = dialing.prove(first)
    assert (len(first), len(proof), answering.needs) == (ANSWER, PROOF, PROOF)
    dialing.end(answering.receive(proof))
    return answering


@pytest.mark.parametrize("kind", list(Kind))
def test_two_of_a_job_know_each_other(kind: Kind) -> None:
    encrypted = kind is Kind.TLS
    answering = shake(*(replace(one, encrypted=encrypted) for one in (B, A)), kind)
    assert (answering.peer, answering.kind) == (B.rank, kind)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"secret": b"t" * 32}, "another job"),
        ({"window": 5}, "limits 5"),
        ({"piece": 5}, "and 5, here"),
        ({"rank": 0}, "rank 0 calls 0"),
    ],
)
def test_a_dialer_that_does_not_fit_gets_the_reason(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(Refused, match=why):
        shake(replace(B, **changed), A)


def test_a_listener_without_the_secret_is_no_peer() -> None:
    """It can name the job, for that has crossed the network."""

    class Liar(Identity):
        job = A.job

    with pytest.raises(Refused, match="does not know the job's secret"):
        shake(B, Liar(A.rank, b"t" * 32, A.window, A.piece))


def test_what_was_recorded_is_worth_nothing() -> None:
    dialing, answering = Dialing(B, A.rank, Kind.TCP), Answering(A)
    proof = dialing.prove(answering.receive(dialing.hello))
    again = Answering(A)
    again.receive(dialing.hello)
    with pytest.raises(Refused, match="a wrong proof"):
        again.receive(proof)
    other = Dialing(B, A.rank, Kind.TCP)
    with pytest.raises(Refused, match="does not know"):
        other.prove(Answering(A).receive(dialing.hello))


WORDS = range(1, 64)  # of an answer: beside a "yes" they say nothing, and are not proved


def test_no_changed_bit_gets_through() -> None:
    rng = random.Random(new_seed())
    for _ in range(2000):
        dialing, answering, step = Dialing(B, A.rank, Kind.TCP), Answering(A), rng.randrange(4)

        def sent(message: bytes, number: int, step: int = step) -> bytes:
            if number != step:
                return message
            at = rng.choice([i for i in range(len(message)) if number % 2 == 0 or i not in WORDS])
            return message[:at] + bytes([message[at] ^ 1 << rng.randrange(8)]) + message[at + 1 :]

        def whole(dialing: Dialing = dialing, answering: Answering = answering) -> None:
            proof = dialing.prove(sent(answering.receive(sent(dialing.hello, 0)), 1))
            dialing.end(sent(answering.receive(sent(proof, 2)), 3))

        with pytest.raises(Refused):
            whole()


class Door:
    """A listener, the callers that it let in, and why it did not let others in."""

    def __init__(self) -> None:
        self.came: list[int | None] = []
        self.strangers: list[str] = []
        self.listener = Listener(A, "127.0.0.1", self._accept, self.strangers.append)
        self.address = Address("127.0.0.1", self.listener.port, self.listener.name, "one")

    def _accept(self, answering: Answering, connection: socket.socket) -> None:
        self.came.append(answering.peer)
        connection.close()

    def knock(self) -> socket.socket:
        return socket.create_connection((self.address.host, self.address.port), PATIENCE)


@pytest.fixture
def door() -> Iterator[Door]:
    before = len(os.listdir("/proc/self/fd"))
    door = Door()
    yield door
    door.listener.close()
    until(lambda: len(os.listdir("/proc/self/fd")) <= before, "everything is closed")


def test_garbage_is_answered_by_a_refusal_and_hung_up(door: Door) -> None:
    with door.knock() as stranger:
        stranger.sendall(os.urandom(HELLO))
        answer = stranger.recv(ANSWER, socket.MSG_WAITALL)
        assert answer[:1] == b"\1"
        assert answer[1:].startswith(b"no hello\0")
        assert stranger.recv(1) == b""
    until(lambda: len(door.strangers) == 1, "it is counted")
    ask_tcp(B, A.rank, door.address, PATIENCE)
    until(lambda: door.came == [B.rank], "the peer is let in")


def test_a_handshake_that_stops_in_the_middle_is_closed(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds in longer_and_longer(0.2):
        monkeypatch.setattr(listening, "PATIENCE", seconds)
        before, answer = len(door.strangers), b""
        silent, half, reset = door.knock(), door.knock(), door.knock()
        with contextlib.suppress(OSError):  # where it was closed before it came to this
            half.sendall(Dialing(B, A.rank, Kind.TCP).hello)
            answer = half.recv(ANSWER, socket.MSG_WAITALL)[:1]
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        reset.close()
        for one in (silent, half) if answer else (silent,):
            assert one.recv(1) == b""
        half.close()
        silent.close()
        until(lambda n=before: len(door.strangers) == n + 3, "all are counted")
        assert not door.came
        if answer:
            break
    assert answer == b"\0"


@pytest.mark.long
def test_a_dialer_that_stops_after_its_handshake_delays_no_other(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It belongs to the job, but may have been stopped before it gives its memory."""
    monkeypatch.setattr(listening, "PATIENCE", 4.0)
    with socket.socket(socket.AF_UNIX) as slow:
        slow.connect(f"\0{door.address.name}")
        dialing = Dialing(B, A.rank, Kind.SHM)
        slow.sendall(dialing.hello)
        slow.sendall(dialing.prove(slow.recv(ANSWER, socket.MSG_WAITALL)))
        dialing.end(slow.recv(ANSWER, socket.MSG_WAITALL))
        ask_tcp(B, A.rank, door.address, PATIENCE)
        until(lambda: door.came == [B.rank], "the other one is answered")
        assert slow.recv(1) == b""
    assert door.came == [B.rank]


def test_a_rank_that_cannot_be_is_refused() -> None:
    """Also by one who knows the secret: ranks are of 31 bits in the engine."""
    hello = bytearray(Dialing(B, A.rank, Kind.TCP).hello)
    hello[12:16] = struct.pack("<I", 2**31)
    with pytest.raises(Refused, match="rank 2147483648"):
        Answering(A).receive(bytes(hello))


def test_wrong_descriptors_are_refused_and_closed() -> None:
    """Instead of memory, a ring and two counters; of a peer that belongs to the job."""
    rng = random.Random(new_seed())
    engine = new_engine(1 << 20, 1 << 16, SILENCE)
    try:
        engine.add_peer(B.rank, "rank 1")
        before = len(os.listdir("/proc/self/fd"))
        for count in [*range(7), *(4 for _ in range(50))]:
            here, there = socket.socketpair()
            read, write = os.pipe()
            memory = os.memfd_create("short")
            any_of = [read, write, memory, there.fileno()]
            with there:
                socket.send_fds(there, [b"r"], [rng.choice(any_of) for _ in range(count)])
                with pytest.raises((OSError, RuntimeError)):
                    answer_shm(engine, B.rank, here, PATIENCE)
            for fd in (read, write, memory):
                os.close(fd)
            assert len(os.listdir("/proc/self/fd")) == before
    finally:
        engine.close("over")
