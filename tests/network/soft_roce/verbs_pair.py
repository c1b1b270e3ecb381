"""Two ranks in two processes of the virtual machine, and failures of their rails.

Without torch: its import takes half a minute there.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing as mp
import os
import random
import subprocess
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

from benchmarks.folder_rendezvous import FolderRendezvous
from megatron_adaptra.transport.engine import endpoint as endpoints
from megatron_adaptra.transport.engine import listener
from megatron_adaptra.transport.engine.endpoint import Endpoint

ENDS = "ab"  # rank 0 has rail0a and rail1a, rank 1 the others
RAILS = 2
PATHS = RAILS + 4  # of a peer: each rail, and the connections of the network
MTU = 4096
PATIENCE = 120.0  # seconds
MIB = 1 << 20
_BASE = random.Random(17).randbytes(2 * MIB)
_processes = mp.get_context("fork")


def content(number: int, size: int) -> bytes:
    """Of a message; that of another number differs."""
    start = number * 4099 % MIB
    times = (start + size) // len(_BASE) + 1
    return (_BASE * times)[start : start + size]


class RankFixture:
    """A rank of two. `report`: a word to the test; `command`: waits for one from it."""

    def __init__(self, rank: int, endpoint: Endpoint, pipe: Any) -> None:
        self.rank, self.peer, self.endpoint, self._pipe = rank, 1 - rank, endpoint, pipe
        self.engine = endpoint.engine

    def report(self, word: Any) -> None:
        self._pipe.send(("reported", word))

    def command(self) -> Any:
        if not self._pipe.poll(PATIENCE):
            raise TimeoutError(f"no command of the test for {PATIENCE:g} s")
        return self._pipe.recv()

    def until_paths(self, count: int) -> None:
        until(lambda: self.engine.counts(self.peer).paths == count, f"{count} paths")

    def send(self, tag: int, data: bytes) -> Any:
        return self.engine.send(self.peer, tag, address(data), len(data))

    def receive(self, tag: int, size: int) -> tuple[Any, bytearray]:
        memory = bytearray(size + 1)  # there is no address of nothing
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return self.engine.receive(self.peer, tag, at, size), memory

    def stream(self, count: int, size: int, under_way: int = 16, waits: bool = False) -> list[int]:
        """Send messages to the peer, and get as many; the numbers of those that came wrong.

        Reports "half" in the middle; if it `waits`, the last quarter is posted only after a command
        of the test: `under_way` is less than a quarter then, or "half" is never reported.
        """
        sends: deque[Any] = deque()
        receives: deque[Any] = deque()
        wrong = []
        for n in range(count + under_way):
            if waits and n == 3 * count // 4:
                self.command()
            if n < count:
                receives.append((n, *self.receive(n % 4, size)))
                sends.append(self.send(n % 4, content(2 * n + self.rank, size)))
            if n >= under_way:
                number, work, memory = receives.popleft()
                over(work)
                if memory[:size] != content(2 * number + self.peer, size):
                    wrong.append(number)
                over(sends.popleft())
                if n - under_way == count // 2:
                    self.report("half")
        return wrong


def address(data: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def over(work: Any) -> None:
    """Wait for its end; raises for what failed."""
    assert work.wait(PATIENCE), "it does not end"
    if error := work.error():
        raise RuntimeError(error)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for what has no event to wait for."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.01)


class Pair:
    """Runs `body(fixture, *args)` on both ranks; they can be killed one by one.

    `rails`: how many they use. `fallback`, `timeout`: of their endpoints.
    """

    def __init__(
        self, body: Callable[..., Any], *args: Any, rails: int = RAILS, fallback: bool = True,
        timeout: float = PATIENCE,
    ) -> None:  # fmt: skip
        self._folder = tempfile.TemporaryDirectory()
        rendezvous = FolderRendezvous(Path(self._folder.name))
        self._pipes, self._processes = [], []
        for rank in range(2):
            mine, theirs = _processes.Pipe()
            # No rail that fails here is found by its silence, and a busy host keeps the whole
            # machine silent for longer than the engine's limit.
            options = {
                "machine": f"of rank {rank}", "timeout": timeout, "fallback": fallback,
                "silence": PATIENCE,
            }  # fmt: skip
            job = (theirs, rank, rails, rendezvous, options, body, args)
            process = _processes.Process(target=_rank, args=job, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def report(self, rank: int) -> Any:
        """The next word of a rank."""
        if not self._pipes[rank].poll(PATIENCE):
            raise TimeoutError(f"rank {rank} has reported nothing for {PATIENCE:g} s")
        word, value = self._pipes[rank].recv()
        if word == "raised":
            raise AssertionError(f"rank {rank} raised\n{value}")
        return value

    def first(self, ranks: set[int]) -> int:
        """The rank that reports something first: perhaps an error, for which the others wait."""
        pipes = {self._pipes[rank]: rank for rank in ranks}
        ready = connection.wait(list(pipes), PATIENCE)
        if not ready:
            raise TimeoutError(f"ranks {sorted(ranks)} have reported nothing for {PATIENCE:g} s")
        return pipes[ready[0]]

    def send(self, rank: int, word: Any) -> None:
        self._pipes[rank].send(word)

    def kill(self, rank: int) -> None:
        self._processes[rank].kill()
        self._processes[rank].join()


def _rank(
    pipe: Any, rank: int, rails: int, rendezvous: FolderRendezvous, options: Any, body: Any,
    args: Any,
) -> None:  # fmt: skip
    try:
        # A busy host gives the machine a fraction of a core: no call is given up for that.
        listener.PATIENCE = endpoints._DIAL = PATIENCE / 2
        names = [f"rail{n}{ENDS[rank]}" for n in range(rails)]
        os.environ["NCCL_IB_HCA"] = "=" + ",".join(names)
        endpoint = Endpoint(rank, "127.0.0.1", rendezvous=rendezvous, **options)
        endpoint.connect([1 - rank], PATIENCE)
        endpoint.open_rails(1 - rank)
        result = body(RankFixture(rank, endpoint, pipe), *args)
        pipe.send(("reported", result))
        pipe.recv()  # the other one may still need this end
        endpoint.close()
    except BaseException:
        pipe.send(("raised", traceback.format_exc()))


def results(pair: Pair) -> list[Any]:
    """What the body has returned on each rank; then both end."""
    found: dict[int, Any] = {}
    while len(found) < 2:
        rank = pair.first(set(range(2)) - set(found))
        found[rank] = pair.report(rank)
    for rank in range(2):
        pair.send(rank, "end")
    return [found[0], found[1]]


# The network.


def link(rail: int, rank: int, state: str) -> None:
    subprocess.run(["ip", "link", "set", f"net{rail}{ENDS[rank]}", state], check=True)


def lose(rail: int, percent: int) -> None:
    """So many packets of both directions, from now on."""
    for end in ENDS:
        words = f"tc qdisc replace dev net{rail}{end} root netem loss {percent}%"
        subprocess.run(words.split(), check=True)


@contextlib.contextmanager
def mended() -> Iterator[None]:
    """The network is as at first afterwards."""
    try:
        yield
    finally:
        for rail in range(RAILS):
            for rank, end in enumerate(ENDS):
                net = f"net{rail}{end}"
                subprocess.run(
                    ["tc", "qdisc", "del", "dev", net, "root"], capture_output=True, check=False
                )
                link(rail, rank, "up")
        for rail in range(RAILS):
            for end in ENDS:
                state = Path(f"/sys/class/infiniband/rail{rail}{end}/ports/1/state")
                until(lambda: "ACTIVE" in state.read_text(), "the port is up")  # noqa: B023


def packets(rail: int, rank: int) -> int:
    """That a rank has sent over a rail."""
    counters = f"/sys/class/infiniband/rail{rail}{ENDS[rank]}/ports/1/hw_counters"
    return int(Path(counters, "sent_pkts").read_text())
