"""Two endpoints of a job exchange messages, and strangers come: it goes on as if they did not."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import PATIENCE, in_time
from transport.ranks import until
from transport.wiretap import Wiretap

from megatron_adaptra.transport.engine.endpoint import CONNECTIONS, PIECE, WINDOW, Endpoint
from megatron_adaptra.transport.engine.handshake import (
    ANSWER,
    HELLO,
    PROOF,
    Dialing,
    Identity,
    Kind,
)
from megatron_adaptra.transport.engine.listener import MOST

STRANGER = Path(__file__).parent / "stranger.py"
SIZE, TAGS, ROUNDS = 1 << 18, 4, 50
PAIRS = 15  # of exchanges, without strangers and with them
# Of the fastest ones, with strangers to without. Those are on the same processors: they may take a
# half of them, but next to nothing of what this process does is for them.
SECONDS, PROCESSOR = 3.0, 1.5
MB = 16


class Pair:
    """Rank 0 and rank 1 of a job; what they say to each other at first is recorded."""

    def __init__(self, folder: Path) -> None:
        self._first = {True: bytearray(), False: bytearray()}  # of the first connection
        self.rendezvous = Wiretap(folder, self._record)
        self.ends = [
            Endpoint(rank, "127.0.0.1", f"of {rank}", self.rendezvous, PATIENCE) for rank in (0, 1)
        ]
        for rank in (1, 0):
            self.ends[rank].connect([1 - rank])
        until(lambda: self.ends[0].engine.counts(1).paths == CONNECTIONS, "all are there")
        secret = bytes.fromhex((folder / "secret").read_text())
        self.one = Identity(1, secret, WINDOW, PIECE)
        listener = self.ends[0].listener
        self.doors = {"tcp": f"127.0.0.1:{listener.port}", "unix": f"@{listener.name}"}
        self._memory = [[(ctypes.c_char * SIZE)() for _ in range(2 * TAGS)] for _ in range(2)]

    def _record(self, number: int, dials: bool, data: bytes) -> bytes:
        if number == 0:
            self._first[dials] += data[: max(0, 1000 - len(self._first[dials]))]
        return data

    def exchange(self) -> tuple[float, float]:
        """Messages both ways, with their contents looked at.

        The seconds that they took, and those of the processor for all that this process did.
        """
        began, spent = time.monotonic(), time.process_time()
        for number in range(ROUNDS):
            works = []
            for rank, memory in enumerate(self._memory):
                for tag in range(TAGS):
                    got, sent = memory[tag], memory[TAGS + tag]
                    struct.pack_into("<III", sent, 0, rank, number, tag)
                    engine, peer = self.ends[rank].engine, 1 - rank
                    works.append(engine.receive(peer, tag, ctypes.addressof(got), SIZE))
                    works.append(engine.send(peer, tag, ctypes.addressof(sent), SIZE))
            for work in works:
                assert work.wait(PATIENCE)
                assert not work.error(), work.error()
            for rank, memory in enumerate(self._memory):
                for tag in range(TAGS):
                    assert struct.unpack_from("<III", memory[tag]) == (1 - rank, number, tag)
        return time.monotonic() - began, time.process_time() - spent

    def call(self, door: str) -> socket.socket:
        if door == "unix":
            one = socket.socket(socket.AF_UNIX)
            one.settimeout(PATIENCE)
            one.connect("\0" + self.doors[door][1:])
            return one
        host, port = self.doors[door].split(":")
        return socket.create_connection((host, int(port)), PATIENCE)

    def recorded_handshake(self) -> tuple[bytes, bytes]:
        """What a dialer and its listener have sent in a handshake that went well."""
        dialer, listener = self._first[True], self._first[False]
        return bytes(dialer[: HELLO + PROOF]), bytes(listener[: 2 * ANSWER])

    def close(self) -> None:
        for end in self.ends:
            end.close()
        self.rendezvous.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.close()


@contextlib.contextmanager
def strangers(how: str, where: str, recorded: bytes) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, str(STRANGER), how, where, recorded.hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"on\n"
            yield process
        finally:
            process.kill()


def memory() -> float:
    """MB that this process has for itself."""
    found = re.search(r"Pss_Anon: +(\d+)", Path("/proc/self/smaps_rollup").read_text())
    assert found is not None
    return int(found[1]) / 1024


@pytest.mark.timing
@pytest.mark.parametrize(("how", "door"), [("visits", "tcp"), ("flood", "unix")])
def test_nobody_feels_strangers(
    how: str, door: str, pair: Pair, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture
) -> None:
    recorded, _ = pair.recorded_handshake()
    records, door_of = pair.ends[0].records, pair.doors[door]
    count = {"flood": 10_000 if request.config.getoption("--full") else 2000}.get(how, 50)
    pair.exchange()
    before, quiet, disturbed, most = memory(), [], [], 0
    with strangers(how, door_of, recorded) as process:
        while len(quiet) < PAIRS or records.strangers < count:
            process.send_signal(signal.SIGSTOP)
            quiet.append(pair.exchange())
            process.send_signal(signal.SIGCONT)
            disturbed.append(pair.exchange())
            most = max(most, len(os.listdir("/proc/self/fd")))
    assert memory() < before + MB
    assert most < MOST + 100
    assert pair.ends[0].engine.counts(1).paths == CONNECTIONS
    assert [event.what for event in records.last] == ["stranger"]
    assert capfd.readouterr().err.count("\n") == 1
    for without, within, most_of in zip(
        zip(*quiet, strict=True), zip(*disturbed, strict=True), (SECONDS, PROCESSOR), strict=True
    ):
        print(f"{min(without):.3f} s, with {records.strangers} strangers {min(within):.3f} s")
        in_time("an exchange beside strangers", min(within), most_of * min(without))


def test_a_replay_to_the_listener_opens_nothing(pair: Pair) -> None:
    data, _ = pair.recorded_handshake()
    with pair.call("unix") as stranger:
        stranger.sendall(data[:HELLO])
        assert stranger.recv(ANSWER, socket.MSG_WAITALL)[:1] == b"\0"
        stranger.sendall(data[HELLO:])
        assert stranger.recv(ANSWER, socket.MSG_WAITALL).startswith(b"\1a wrong proof\0")
        assert stranger.recv(1) == b""
    assert pair.ends[0].engine.counts(1).paths == CONNECTIONS
    pair.exchange()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (bytes(64), "no frame begins here"),
        (struct.pack("<HBBI6Q", 0xADA1, 1, 1, 1 << 30, 1, 0, 1 << 30, 0, 0, 0) + bytes(8), "piece"),
        (struct.pack("<HBBI7Q", 0xADA1, 5, 0, 0, 0, 0, 0, 0, 0, 0, 1 << 60), "against"),
    ],
    ids=["garbage", "a piece too long", "too much credit"],
)
def test_who_breaks_the_protocol_loses_that_path_alone(data: bytes, why: str, pair: Pair) -> None:
    """Although it belongs to the job, and has proved it."""
    dialing = Dialing(pair.one, 0, Kind.TCP)
    with pair.call("tcp") as broken:
        broken.sendall(dialing.hello)
        broken.sendall(dialing.prove(broken.recv(ANSWER, socket.MSG_WAITALL)))
        dialing.end(broken.recv(ANSWER, socket.MSG_WAITALL))
        broken.sendall(data)
        with contextlib.suppress(ConnectionResetError):
            while broken.recv(1 << 16):
                pass
    records = pair.ends[0].records.last
    until(lambda: len(records) == 1, "it is recorded")
    assert (records[0].what, records[0].rank, records[0].side) == ("lost", 1, "there")
    assert why in records[0].why
    assert pair.ends[0].engine.counts(1).paths == CONNECTIONS
    pair.exchange()
    assert not pair.ends[1].records.last
