"""Connections of the engine that break, one by one or all at once: each message arrives once."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import stat
import threading
import time
from pathlib import Path

import pytest
import torch
from patience import PATIENCE
from seeding import new_seed
from transport.ranks import Processes, RankFixture, until

from benchmarks.folder_rendezvous import FolderRendezvous
from megatron_adaptra.transport.engine.endpoint import Endpoint

TAGS, COUNT = 4, 120
LARGEST = 3 << 20  # bytes


def content(seed: int, number: int) -> torch.Tensor:
    rng = random.Random(f"{seed} {number}")
    size = rng.choice((0, 1, 4096, rng.randrange(LARGEST)))
    return torch.frombuffer(bytearray(rng.randbytes(size) or b"."), dtype=torch.uint8)[:size]


def connections(port: int | None = None) -> list[int]:
    """Descriptors of this process's connections to a peer's listener, or from there.

    `port`: the listener's, where the process has had others.
    """
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            fd = int(name)
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as one:
                ours = one.family in (socket.AF_INET, socket.AF_UNIX)
                if not ours or one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    continue
                if port is None or ("127.0.0.1", port) in (one.getsockname(), one.getpeername()):
                    found.append(fd)
    return found


def cut(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:
            one.shutdown(socket.SHUT_RDWR)


def talks(rank_fixture: RankFixture, seed: int, cuts: str) -> list[int]:
    """Messages both ways while connections break; the numbers of those that came wrong."""
    peer, rng = 1 - rank_fixture.rank, random.Random(f"{seed} of {rank_fixture.rank}")
    over = threading.Event()

    def breaks() -> None:
        while not over.wait(rng.uniform(0.01, 0.2)):
            found = connections()
            cut(found if cuts == "all" else rng.sample(found, min(1, len(found))))

    breaker = threading.Thread(target=breaks)
    breaker.start()
    try:
        sent = [content(seed + rank_fixture.rank, n) for n in range(COUNT)]
        got = [torch.zeros_like(content(seed + peer, n)) for n in range(COUNT)]
        sends, receives = [], []
        for n in range(COUNT):
            sends.append(rank_fixture.transport.isend(sent[n], peer, n % TAGS))
            if rng.random() < 0.5:
                time.sleep(rng.uniform(0, 0.01))
            receives.append(rank_fixture.transport.irecv(got[n], peer, n % TAGS))
        for work in (*receives, *sends):
            work.wait(PATIENCE)
    finally:
        over.set()
        breaker.join()
    rank_fixture.meet()
    return [n for n in range(COUNT) if not torch.equal(got[n], content(seed + peer, n))]


@pytest.mark.parametrize(
    ("cuts", "kind"),
    [
        ("one", "tls"), ("all", "tcp"), ("all", "shm"),
        *(pytest.param(*more, marks=pytest.mark.long)
          for more in (("one", "tcp"), ("one", "shm"), ("all", "tls"))),
    ],
)  # fmt: skip
def test_every_message_arrives_once_whatever_breaks(kind: str, cuts: str) -> None:
    with Processes(talks, new_seed(), cuts, kind=kind) as processes:
        assert [processes.result(rank) for rank in (0, 1)] == [[], []]


@pytest.mark.parametrize("count", [1, 4])
def test_all_uses_of_an_endpoint_share_its_connections(tmp_path: Path, count: int) -> None:
    """Each use connects its peers, and messages overtake each other on what is too many."""
    rendezvous = FolderRendezvous(tmp_path)
    ends = [
        Endpoint(rank, "127.0.0.1", f"of {rank}", rendezvous, PATIENCE, connections=count)
        for rank in (0, 1)
    ]
    try:
        for _ in range(3):
            for rank in (1, 0):  # the higher one dials
                ends[rank].connect([1 - rank])
            until(lambda: not ends[1]._peers[0].dialling, "all are dialled")
        assert ends[1].engine.counts(0).paths == count
        assert len(connections(ends[0].listener.port)) == 2 * count  # both ends are here
    finally:
        for end in ends:
            end.close()
