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
from fakes.slow_net.network import SOURCE, Passed, SlowNetwork, build
from forks import processes
from patience import PATIENCE, in_time

LARGEST = 64 << 20
SHIFTS, STEP = 4096, 61  # bytes: so many messages in a row are different
WINDOW = 32  # receives posted at once
HERE, THERE = HOSTS = ("host-0", "host-1")
Times = list[int]


class Contents:
    """A text has the bytes of all messages: each is a part of it that begins elsewhere."""

    def __init__(self) -> None:
        part = random.Random(0).randbytes(1_048_573)  # a prime: no two pages are the same
        self._text = ctypes.create_string_buffer(part * (LARGEST // len(part) + 1))

    def at(self, number: int) -> int:
        """Where the bytes of that message begin."""
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
        assert polled(partial(driver.test, request), PATIENCE) is not None
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
        while len(posted) < min(number + WINDOW, len(sizes)):
            more = len(posted)
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
    """Run the end of a host, whose process this is, round by round, until there are no sizes."""
    os.environ.update(environment)
    driver, contents = Driver(), Contents()
    opened = len(os.listdir("/proc/self/fd"))
    if environment["NCCL_HOSTID"] == HERE:
        end, work, kind = polled(partial(driver.connect, pipe.recv()), PATIENCE), sends, "sending"
    else:
        handle, listener = driver.listen()
        pipe.send(handle)
        end, work = polled(partial(driver.accept, listener), PATIENCE), receives
        kind = "receiving"
        driver.close("listener", listener)
    pipe.send("connected")
    while sizes := pipe.recv():
        try:
            pipe.send(work(driver, end, contents, sizes))
        except NetError as error:
            pipe.send(error)
    driver.close(kind, end)
    mapped = "adaptra-slow-net" in Path("/proc/self/maps").read_text()
    pipe.send((len(os.listdir("/proc/self/fd")) - opened, mapped))


class Pair:
    """A pair of processes moves messages over the slow network, from one to the other.

    `text`: of the plugin, with a planted fault.
    """

    def __init__(self, folder: Path, credit_first: bool, text: str | None = None) -> None:
        folder.mkdir(exist_ok=True)
        self.network = SlowNetwork(folder, HOSTS)
        self.network.credit_first(credit_first)
        self.credit_first, self.pipes, self.processes = credit_first, list[Any](), list[Any]()
        try:
            plugin = {"NCCL_NET_PLUGIN": str(build(text))}
        except CannotBuild as why:
            pytest.skip(str(why))
        for host in HOSTS:
            mine, theirs = processes().Pipe()
            arguments = (theirs, self.network.environment(host) | plugin)
            process = processes().Process(target=run_end, args=arguments, daemon=True)
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

    def begin(self, sizes: Sequence[int]) -> None:
        for pipe in self.pipes:
            pipe.send(sizes)

    def result(self, side: int) -> Any:
        """What that process has found; raises the error that its plugin has returned."""
        assert self.pipes[side].poll(PATIENCE), "no answer"
        found = self.pipes[side].recv()
        if isinstance(found, NetError):
            raise found
        return found

    def move(self, sizes: Sequence[int], delay: float, rate: float = 0.0) -> Moved:
        """The messages have moved, right and not too early."""
        self.delay(delay, rate)
        known = len(self.network.passed())
        self.begin(sizes)
        (before, left), (posted, came, wrong) = self.result(0), self.result(1)
        assert not wrong, f"other bytes: messages {wrong[:10]}"
        moved = Moved(before, left, posted, came, self.network.passed()[known:])
        moved.check(sizes, round(delay * 1e9), self.credit_first)
        return moved


class Moved(NamedTuple):
    """What two processes have seen, and the plugin's log."""

    before: Times
    left: Times
    posted: Times
    came: Times
    log: list[Passed]

    def took(self) -> Times:
        """Nanoseconds from when each left until it had come."""
        return [came - before for before, came in zip(self.before, self.came, strict=True)]

    def check(self, sizes: Sequence[int], delay: int, credit_first: bool) -> None:
        took = self.took()
        assert min(took) >= delay, f"early: after {min(took)} ns of {delay}"
        credits = [left - posted for posted, left in zip(self.posted, self.left, strict=True)]
        assert not credit_first or min(credits) >= delay, f"no credit: {min(credits)} of {delay}"
        assert [(one.bytes, one.tag) for one in self.log] == [(s, n) for n, s in enumerate(sizes)]
        for one, before, left, came in zip(
            self.log, self.before, self.left, self.came, strict=True
        ):
            assert (one.source, one.target) == HOSTS
            assert before <= one.sent <= left
            assert one.asked <= one.sent <= one.arrived - delay
            assert one.arrived <= one.delivered <= came


@contextmanager
def pair(*arguments: Any) -> Iterator[Pair]:
    """Both have nothing open at the end that they did not have, and nothing has a name."""
    made = Pair(*arguments)
    try:
        yield made
    finally:
        for process in made.processes:
            process.kill()
            process.join(PATIENCE)
    named = Path("/proc/net/unix").read_text()
    assert not any(f"adaptra-slow-net-{process.pid}-" in named for process in made.processes)
    names = {path.name.partition("-")[0] for path in made.network.folder.iterdir()}
    assert names == {"links", "passed"}


def some_sizes(count: int, largest: int) -> list[int]:
    """Most are small, one in fifty has up to 1 MiB; none, one and the largest are among them."""
    chance = random.Random(count)
    sizes = [
        chance.randint(0, chance.choice((0, 1, 64, 4096, 1 << 16)) if number % 50 else 1 << 20)
        for number in range(count)
    ]
    sizes[:4], sizes[count // 2] = (0, 1, largest, largest - 1), largest
    return sizes


def prompt(rounds: Sequence[Moved], delay: float) -> None:
    """Some round is: the median is the delay, and all that was in flight took one."""
    best = min(median(one.took()) for one in rounds)
    in_time(f"the median of {delay:g} s", best, 1.05e9 * delay)
    whole = min(one.came[-1] - one.before[0] for one in rounds)
    in_time(f"{WINDOW} in flight together", whole, 1.5e9 * delay)


MODES = pytest.mark.parametrize("credit_first", [False, True], ids=["eager", "credit first"])


@MODES
def test_messages_of_all_sizes_have_their_bytes_and_are_never_early(
    credit_first: bool, tmp_path: Path
) -> None:
    with pair(tmp_path, credit_first) as made:
        made.move(some_sizes(10_000, LARGEST), 0.002)
        made.begin([])
        left = [made.result(side) for side in (0, 1)]
    assert left == [(0, False)] * 2, "descriptors, and memory that is mapped, of closed ends"


@MODES
def test_a_delay_is_kept_whatever_is_in_flight(credit_first: bool, tmp_path: Path) -> None:
    """The delay changes while the link is used; at last there is a rate, too."""
    with pair(tmp_path, credit_first) as made:
        for delay in (0.02, 0.1, 0.0, 0.05):
            rounds = [made.move(some_sizes(WINDOW, 1 << 16), delay) for _ in range(5)]
            if delay:
                prompt(rounds, delay)
        moved = made.move([1 << 20] * 10, 0.02, rate=50e6)
        assert moved.came[-1] - moved.before[0] >= 1e9 * (10 * (1 << 20) / 50e6 + 0.02)


@MODES
def test_a_peer_that_is_killed_is_an_error_and_what_it_has_sent_arrives(
    credit_first: bool, tmp_path: Path
) -> None:
    with pair(tmp_path / "sender", credit_first) as made:
        made.delay(0.2)
        made.begin([1000] * WINDOW)
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


EARLY = ("when < frame.arrived", "when < frame.sent", "early: ")
SWAPPED = ("wire.bytes + frame.offset", "wire.bytes + wire.frames[index ^ 1].offset", "other bytes")
LEAVES = "leaves(end.peer, sent, bytes)"
IN_TURN = (LEAVES, f"std::max(end.last, {LEAVES})", "the median of")
UNASKED = ("sent < wire.credits[index % kFrames]", "false", "no credit: ")


@pytest.mark.parametrize(
    ("credit_first", "find", "put", "words"),
    [
        *((mode, *fault) for mode in (False, True) for fault in (EARLY, SWAPPED, IN_TURN)),
        (True, *UNASKED),
    ],
)
def test_planted_faults_are_found(
    credit_first: bool, find: str, put: str, words: str, tmp_path: Path
) -> None:
    text = SOURCE.read_text()
    assert text.count(find) == 1
    with (
        pair(tmp_path, credit_first, text.replace(find, put)) as made,
        pytest.raises(AssertionError, match=words),
    ):
        prompt([made.move([1000] * WINDOW, 0.1)], 0.1)
