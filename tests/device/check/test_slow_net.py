"""The slow network of NCCL between two processes, without NCCL: bytes, times, ends."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest
from fakes.cuda.building import CannotBuild
from fakes.slow_net.driver import Driver, NetError, polled
from fakes.slow_net.network import Passed, SlowNetwork, build
from forks import processes
from patience import PATIENCE, in_time

LARGEST = 64 << 20
SHIFTS, STEP = 4096, 61  # bytes: so many messages in a row are different
WINDOW = 32  # receives posted at once
HERE, THERE = HOSTS = ("host-0", "host-1")
MODES = pytest.mark.parametrize("credit_first", [False, True], ids=["eager", "credit first"])
Times = list[int]  # nanoseconds of CLOCK_MONOTONIC


class Contents:
    """A text has the bytes of all messages: each is a part of it that begins elsewhere."""

    def __init__(self) -> None:
        part = random.Random(0).randbytes(1_048_573)  # a prime: no two pages are the same
        self._text = ctypes.create_string_buffer(part * (LARGEST // len(part) + 1))

    def at(self, number: int) -> int:
        return ctypes.addressof(self._text) + number * STEP % SHIFTS


def sends(driver: Driver, end: int, contents: Contents, sizes: Sequence[int]) -> tuple[Times, ...]:
    """The moments just before and just after each message left."""
    before, after, pending = Times(), Times(), deque[int]()
    for number, size in enumerate(sizes):

        def leave(number: int = number, size: int = size) -> int | None:
            while pending and driver.test(pending[0]) is not None:
                pending.popleft()
            now = time.monotonic_ns()
            if request := driver.send(end, contents.at(number), size, number):
                before.append(now)
            return request

        pending.append(polled(leave, PATIENCE))
        after.append(time.monotonic_ns())
    for request in pending:
        polled(partial(driver.test, request), PATIENCE)
    return before, after


def receives(
    driver: Driver, end: int, contents: Contents, sizes: Sequence[int]
) -> tuple[Times, ...]:
    """The moments before each receive and after each message; the numbers of wrong ones."""
    rooms = [mmap.mmap(-1, LARGEST) for _ in range(WINDOW)]
    places = [ctypes.addressof(ctypes.c_char.from_buffer(room)) for room in rooms]
    posted, came, wrong, pending = Times(), Times(), Times(), deque[int]()
    compare = ctypes.CDLL(None).memcmp
    compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    for number, size in enumerate(sizes):
        for more in range(len(posted), min(number + WINDOW, len(sizes))):
            posted.append(time.monotonic_ns())
            request = driver.receive(end, places[more % WINDOW], sizes[more], more)
            assert request is not None
            pending.append(request)
        found = polled(partial(driver.test, pending.popleft()), PATIENCE)
        came.append(time.monotonic_ns())
        if found != size or compare(places[number % WINDOW], contents.at(number), size):
            wrong.append(number)
    return posted, came, wrong


def run_end(pipe: Any, environment: dict[str, str]) -> None:
    """Run a host's end, round by round, until there are no sizes."""
    os.environ.update(environment)
    driver, contents = Driver(), Contents()
    opened = len(os.listdir("/proc/self/fd"))
    if environment["NCCL_HOSTID"] == HERE:
        work, kind = sends, "sending"
        end = polled(partial(driver.connect, pipe.recv()), PATIENCE)
    else:
        work, kind = receives, "receiving"
        handle, listener = driver.listen()
        pipe.send(handle)
        end = polled(partial(driver.accept, listener), PATIENCE)
        driver.call("close_listener", listener)
    pipe.send("connected")
    while sizes := pipe.recv():
        try:
            pipe.send(work(driver, end, contents, sizes))
        except NetError as error:
            pipe.send(error)
    driver.call(f"close_{kind}", end)
    mapped = "adaptra-slow-net" in Path("/proc/self/maps").read_text()
    pipe.send((len(os.listdir("/proc/self/fd")) - opened, mapped))


class Moved(NamedTuple):
    """A message as its two processes have seen it, and as the plugin's log has it."""

    before: int
    left: int
    posted: int
    came: int
    log: Passed


class Pair:
    """A pair of processes moves messages over the slow network, from one to the other."""

    def __init__(self, folder: Path, credit_first: bool, plugin: Path) -> None:
        folder.mkdir()
        self.network, self.credit_first = SlowNetwork(folder, HOSTS), credit_first
        self.network.credit_first(credit_first)
        self.pipes, self.processes = list[Any](), list[Any]()
        for host in HOSTS:
            mine, theirs = processes().Pipe()
            environment = self.network.environment(host) | {"NCCL_NET_PLUGIN": str(plugin)}
            process = processes().Process(target=run_end, args=(theirs, environment), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)
        self.pipes[0].send(self.result(1))
        assert [self.result(side) for side in (0, 1)] == ["connected"] * 2

    def delay(self, seconds: float, rate: float = 0.0) -> None:
        """Of the link, each way; `rate`: of the messages' way."""
        self.network.slow(HERE, THERE, seconds, rate)
        self.network.slow(THERE, HERE, seconds)

    def result(self, side: int) -> Any:
        """What that process has found; raises the error that its plugin has returned."""
        assert self.pipes[side].poll(PATIENCE), "no answer"
        found = self.pipes[side].recv()
        if isinstance(found, NetError):
            raise found
        return found

    def move(self, sizes: Sequence[int], seconds: float, rate: float = 0.0) -> list[Moved]:
        """The messages, which have moved, right and not too early."""
        self.delay(seconds, rate)
        delay, known = round(seconds * 1e9), len(self.network.passed())
        for pipe in self.pipes:
            pipe.send(sizes)
        (before, left), (posted, came, wrong) = self.result(0), self.result(1)
        assert not wrong, f"other bytes: messages {wrong[:10]}"
        log = self.network.passed()[known:]
        moved = [Moved(*one) for one in zip(before, left, posted, came, log, strict=True)]
        for number, one in enumerate(moved):
            assert one.came >= one.before + delay, f"early: {one.came - one.before} of {delay}"
            credit = one.left - one.posted
            assert not self.credit_first or credit >= delay, f"no credit: {credit} of {delay}"
            assert one.log[:4] == (HERE, THERE, sizes[number], number)
            assert one.log.asked <= one.log.sent <= one.log.arrived - delay
            assert one.before <= one.log.sent <= one.left
            assert one.log.arrived <= one.log.delivered <= one.came
        return moved


@contextmanager
def pair(folder: Path, credit_first: bool, plugin: Path | None = None) -> Iterator[Pair]:
    """The pair, of which nothing is left but the links and what has passed."""
    try:
        made = Pair(folder, credit_first, plugin or build())
    except CannotBuild as why:
        pytest.skip(str(why))
    try:
        yield made
    finally:
        for process in made.processes:
            process.kill()
            process.join(PATIENCE)
    named = Path("/proc/net/unix").read_text()
    assert not any(f"adaptra-slow-net-{process.pid}-" in named for process in made.processes)
    assert {path.name.partition("-")[0] for path in folder.iterdir()} == {"links", "passed"}


def some_sizes(count: int, largest: int) -> list[int]:
    """Most are small, one in fifty has up to 1 MiB; none, one and the largest are among them."""
    chance = random.Random(count)
    sizes = [
        chance.randint(0, chance.choice((0, 1, 64, 4096, 1 << 16)) if number % 50 else 1 << 20)
        for number in range(count)
    ]
    sizes[:4], sizes[count // 2] = (0, 1, largest, largest - 1), largest
    return sizes


def prompt(rounds: Sequence[Sequence[Moved]], delay: float) -> None:
    """Some round is: the median is the delay, and all that was in flight took one."""
    best = min(median(one.came - one.before for one in moved) for moved in rounds)
    in_time(f"the median of {delay:g} s", best, 1.05e9 * delay)
    whole = min(moved[-1].came - moved[0].before for moved in rounds)
    in_time(f"{WINDOW} in flight together", whole, 1.5e9 * delay)


@MODES
def test_messages_of_all_sizes_have_their_bytes_and_are_never_early(
    credit_first: bool, tmp_path: Path
) -> None:
    with pair(tmp_path / "net", credit_first) as made:
        made.move(some_sizes(10_000, LARGEST), 0.002)
        for pipe in made.pipes:
            pipe.send([])
        left = [made.result(side) for side in (0, 1)]
    assert left == [(0, False)] * 2, "descriptors, and memory that is mapped, of closed ends"


@MODES
def test_a_delay_is_kept_whatever_is_in_flight(credit_first: bool, tmp_path: Path) -> None:
    """The delay changes while the link is used; at last there is a rate, too."""
    with pair(tmp_path / "net", credit_first) as made:
        for delay in (0.02, 0.1, 0.0, 0.05):
            rounds = [made.move(some_sizes(WINDOW, 1 << 16), delay) for _ in range(5)]
            if delay:
                prompt(rounds, delay)
        moved = made.move([1 << 20] * 10, 0.02, rate=50e6)
        assert moved[-1].came - moved[0].before >= 1e9 * (10 * (1 << 20) / 50e6 + 0.02)


@MODES
def test_a_peer_that_is_killed_is_an_error_and_what_it_has_sent_arrives(
    credit_first: bool, tmp_path: Path
) -> None:
    with pair(tmp_path / "sender", credit_first) as made:
        made.delay(0.2)
        for pipe in made.pipes:
            pipe.send([1000] * WINDOW)
        made.result(0)
        made.processes[0].kill()
        assert made.result(1)[2] == []
        made.pipes[1].send([1])
        with pytest.raises(NetError):
            made.result(1)
    with pair(tmp_path / "receiver", credit_first) as made:
        made.processes[1].kill()
        made.pipes[0].send([1] * 5000)  # more than a connection takes
        with pytest.raises(NetError):
            made.result(0)
