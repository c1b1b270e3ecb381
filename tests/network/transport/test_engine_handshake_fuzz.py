"""Whatever bytes a handshake brings, the answer is a refusal, and the listener goes on."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct

import pytest
from patience import PATIENCE
from seeding import new_seed
from transport.ranks import until
from transport.test_engine_handshake import A, B, Door, door  # noqa: F401

from megatron_adaptra.transport.engine.bindings import new_engine
from megatron_adaptra.transport.engine.dial import answer_shm, ask_tcp
from megatron_adaptra.transport.engine.endpoint import SILENCE
from megatron_adaptra.transport.engine.handshake import (
    ANSWER,
    HELLO,
    PROOF,
    Answering,
    Dialing,
    Kind,
    Refused,
)

ROUNDS = 5000
FIELDS = [(0, 8), (8, 2), (10, 1), (11, 1), (12, 4), (16, 4), (20, 8), (28, 8), (36, 16), (52, 32)]


@pytest.fixture
def rng() -> random.Random:
    return random.Random(new_seed())


def damaged(message: bytes, rng: random.Random) -> bytes:
    """Other bits, another field of a hello, or something else altogether."""
    data = bytearray(message)
    match rng.randrange(3):
        case 0:
            for _ in range(rng.randrange(1, 9)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 1:
            at, size = rng.choice(FIELDS)
            size = len(data[at : at + size])
            value = rng.choice([bytes(size), b"\xff" * size, rng.randbytes(size)])
            data[at : at + size] = value
        case _:
            data = bytearray(rng.randbytes(len(data)))
    return bytes(data)


def test_the_called_end_answers_or_refuses(rng: random.Random) -> None:
    answered = 0
    for _ in range(ROUNDS):
        dialing, answering = Dialing(B, A.rank, rng.choice(list(Kind))), Answering(A)
        hello = damaged(dialing.hello, rng)
        with contextlib.suppress(Refused):
            assert len(answering.receive(hello)) == ANSWER
            assert answering.needs == PROOF
            assert answering.peer is None
            answered += 1  # to another nonce, kind or caller
            with pytest.raises(Refused, match="a wrong proof"):
                answering.receive(rng.randbytes(PROOF))
    assert 0 < answered < ROUNDS


def test_a_rank_that_cannot_be_is_refused() -> None:
    """Also by one who knows the secret: ranks are of 31 bits in the engine."""
    hello = bytearray(Dialing(B, A.rank, Kind.TCP).hello)
    hello[12:16] = struct.pack("<I", 2**31)
    with pytest.raises(Refused, match="rank 2147483648"):
        Answering(A).receive(bytes(hello))


def test_a_listener_outlives_what_it_receives(door: Door, rng: random.Random) -> None:  # noqa: F811
    rounds = 200
    for _ in range(rounds):
        words = damaged(Dialing(B, A.rank, Kind.TCP).hello, rng)
        words += rng.randbytes(rng.randrange(300))
        with door.knock() as stranger, contextlib.suppress(OSError):
            if rng.random() < 0.3:
                words = words[: rng.randrange(HELLO + PROOF)]
            while words:
                part = rng.randrange(1, len(words) + 1)
                stranger.sendall(words[:part])
                words = words[part:]
    until(lambda: len(door.strangers) == rounds, "all are counted")
    ask_tcp(B, A.rank, door.address, PATIENCE)
    until(lambda: door.came == [B.rank], "the peer is let in")


def test_wrong_descriptors_are_refused_and_closed(rng: random.Random) -> None:
    """Instead of memory, a ring and two counters; of a peer that belongs to the job."""
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
