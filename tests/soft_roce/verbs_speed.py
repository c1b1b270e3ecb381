"""How fast the engine is over one rail, beside ib_write_bw of perftest, in turns.

Both write from registered memory, as many messages at once as there is room for: ib_write_bw 128
from one place to one place, the engine what its slots hold, from a few places, to receives that are
posted ahead, each with memory of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from soft_roce.verbs_pair import ENDS, MIB, PATHS, RAILS, Pair, RankFixture, content, over

MESSAGES = {64 << 10: 300, MIB: 24}  # of a round, by size
LONG = 64 * MIB  # over a long link
_TCP = PATHS - RAILS
# How many paths, and the options of a pair.
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "rail": (1, {"rails": 1, "fallback": False}),
    "2 queue pairs": (2, {"rails": 1, "fallback": False, "connections": 2}),
    "TCP": (_TCP, {"rails": 0}),
    "chosen": (1 + _TCP, {"rails": 1}),
}
_SOURCES = 16  # messages of different contents
_PORT = 18515  # perftest's own; in the machine nobody else has it


def perftest(size: int, count: int) -> float:
    """MB/s of ib_write_bw from rail0a to rail0b."""
    words = ["ib_write_bw", "-x", "1", "-s", str(size), "-n", str(count), "-F", "-p", str(_PORT)]
    server = subprocess.Popen([*words, "-d", "rail0b"], stdout=subprocess.PIPE, text=True)
    try:
        for _ in range(100):  # until it listens
            client = subprocess.run(
                [*words, "-d", "rail0a", "127.0.0.1"], capture_output=True, text=True, timeout=120
            )
            if client.returncode == 0:
                break
            time.sleep(0.1)
        rows = [line.split() for line in client.stdout.splitlines()]
        row = next(row for row in rows if row and row[0] == str(size))
        return float(row[3])
    finally:
        server.kill()
        server.communicate()


def rounds(fixture: RankFixture, size: int, count: int, paths: int = 1) -> Any:
    """Rank 0 sends `count` messages at each command; seconds until all have arrived."""
    fixture.until_paths(paths)
    data = [content(n, size) for n in range(min(count, _SOURCES))]
    sources = [fixture.engine.take(size) for _ in data]
    for source, each in zip(sources, data, strict=True):
        ctypes.memmove(source.address, each, size)
    buffers = [fixture.receive(n, size) for n in range(count)] if fixture.rank == 1 else []
    fixture.report("ready")
    while fixture.command() != "end":
        if fixture.rank == 0:
            start = time.monotonic()
            works = [
                fixture.engine.send(fixture.peer, n, sources[n % len(data)].address, size)
                for n in range(count)
            ]
            for work in reversed(works):  # one wait, not one for each
                over(work)
            fixture.report(time.monotonic() - start)
        else:
            over(buffers[-1][0])
            for n, (work, memory) in enumerate(buffers):
                over(work)
                assert memory[:size] == data[n % len(data)], n
                buffers[n] = fixture.receive_into(n, memory, size)
            fixture.report("right")


def compare(size: int, turns: int) -> tuple[float, float, float]:
    """The engine's MB/s and perftest's, medians, and the median of their ratios."""
    count = MESSAGES[size]
    ours, theirs = [], []
    with Pair(rounds, size, count, rails=1, fallback=False) as pair:
        for rank in range(2):
            assert pair.report(rank) == "ready"
        for _ in range(turns + 1):  # the first one finds memory cold
            for rank in range(2):
                pair.send(rank, "go")
            seconds = pair.report(0)
            assert pair.report(1) == "right"
            ours.append(size * count / seconds / 2**20)  # as perftest counts
            theirs.append(perftest(size, count))
        for rank in range(2):
            pair.send(rank, "end")
    ratios = [mine / other for mine, other in zip(ours[1:], theirs[1:], strict=True)]
    return statistics.median(ours[1:]), statistics.median(theirs[1:]), statistics.median(ratios)


def over_a_long_link(
    delay: int, turns: int, ways: Sequence[str], rate: int = 0
) -> dict[str, float]:
    """Seconds of LONG bytes, medians, by way.

    `delay`: ms each way, of the rail's link and of the machine's own; `rate`: of both, MB/s, 0: as
    fast as it gets. `ways`: names of WAYS.
    """
    nets = ["lo", *(f"net0{end}" for end in ENDS)]
    limit = f" rate {8 * rate}mbit" if rate else ""
    with contextlib.ExitStack() as stack:
        pairs = [
            stack.enter_context(Pair(rounds, LONG, 1, paths, **options))
            for paths, options in (WAYS[way] for way in ways)
        ]
        for pair in pairs:
            for rank in range(2):
                assert pair.report(rank) == "ready"
        for net in nets:
            words = f"tc qdisc replace dev {net} root netem limit 100000 delay {delay}ms{limit}"
            stack.callback(subprocess.run, f"tc qdisc del dev {net} root".split(), check=True)
            subprocess.run(words.split(), check=True)
        took: list[list[float]] = [[] for _ in pairs]
        for _ in range(turns + 2):  # until windows have grown
            for pair, seconds in zip(pairs, took, strict=True):
                for rank in range(2):
                    pair.send(rank, "go")
                seconds.append(pair.report(0))
                assert pair.report(1) == "right"
        for pair in pairs:
            for rank in range(2):
                pair.send(rank, "end")
    return {way: statistics.median(seconds[2:]) for way, seconds in zip(ways, took, strict=True)}
