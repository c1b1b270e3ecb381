"""A path that failed comes back: it is on trial until it has carried enough."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from netlab.hole import dig, fill
from patience import PATIENCE
from transport.ranks import until
from transport.test_engine_paths import connections, cut

from megatron_adaptra.transport.engine.endpoint import CONNECTIONS, Endpoint
from megatron_adaptra.transport.engine.rendezvous import FolderRendezvous

SIZE = 1 << 20
MESSAGES = 20  # of an exchange


class Pair:
    """Two endpoints over TCP, and what they say meanwhile."""

    def __init__(self, folder: Path) -> None:
        rendezvous = FolderRendezvous(folder)
        self.ends = [
            Endpoint(rank, "127.0.0.1", f"of {rank}", rendezvous, PATIENCE) for rank in (0, 1)
        ]
        for rank in (1, 0):
            self.ends[rank].connect([1 - rank])
        until(lambda: self.paths() == [CONNECTIONS] * 2, "all are there")

    def paths(self) -> list[int]:
        """Of each side, those that have passed their trial."""
        counts = [self.ends[rank].engine.counts(1 - rank) for rank in (0, 1)]
        return [count.paths - count.trials for count in counts]

    def lost(self) -> int:
        return [event.what for event in self.ends[1].records.last].count("lost")

    def exchange(self) -> None:
        content = os.urandom(SIZE)
        sent = ctypes.create_string_buffer(content, SIZE)
        got = [ctypes.create_string_buffer(SIZE) for _ in range(MESSAGES)]
        works = []
        for number, memory in enumerate(got):
            me, peer = number % 2, 1 - number % 2
            receive, send = self.ends[me].engine.receive, self.ends[peer].engine.send
            works.append(receive(peer, 1, ctypes.addressof(memory), SIZE))
            works.append(send(me, 1, ctypes.addressof(sent), SIZE))
        for work in works:
            assert work.wait(PATIENCE)
            assert not work.error(), work.error()
        assert all(memory.raw == content for memory in got)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    for end in pair.ends:
        end.close()


def listener_of(end: Endpoint) -> socket.socket:
    """Its socket; those that it accepts inherit what is set there."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            one = socket.socket(fileno=os.dup(int(name)))
            here = one.getsockname() == ("127.0.0.1", end.listener.port)
            if here and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return one
            one.close()
    raise AssertionError("it does not listen")


@pytest.mark.timing
def test_what_carries_small_packets_alone_stays_on_trial(pair: Pair) -> None:
    """All others go on without it, and it comes back when it carries what is large."""
    with listener_of(pair.ends[0]) as listener:
        dig(listener)
        cut(connections(pair.ends[0].listener.port)[:1])
        until(lambda: pair.lost() == 1, "a path is lost")
        while pair.lost() == 1:  # until those five seconds are over in which nothing arrives
            pair.exchange()
            assert max(pair.paths()) == CONNECTIONS - 1
        fill(listener)
    until(lambda: pair.paths() == [CONNECTIONS] * 2, "it is back")
    pair.exchange()
