"""Messages of random sizes on four tags, both ways: `benchmarks/engine_soak.py --messages 1000000`.

What each holds is looked at, and how much memory is taken is noted from time to time.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from folder_rendezvous import FolderRendezvous

from megatron_adaptra.base.processes import die_with_parent
from megatron_adaptra.transport.engine.endpoint import Endpoint

if TYPE_CHECKING:
    from megatron_adaptra.transport.engine.bindings import Work

TAGS, LARGEST = 4, 1 << 18
AHEAD = 64  # receives posted, and sends under way, at most
NOTES = 10  # of the memory, all in all
TIMEOUT = 120.0


class Message(NamedTuple):
    tag: int
    size: int
    at: int  # where its content begins, in the pattern that both ranks have


def messages(seed: int, rank: int, count: int) -> Iterator[Message]:
    """What `rank` sends: of any size below LARGEST, half of them below its root."""
    rng = random.Random(f"{seed} {rank}")
    for _ in range(count):
        size = rng.getrandbits(rng.randrange(LARGEST.bit_length()))
        yield Message(rng.randrange(TAGS), size, rng.randrange(LARGEST))


class Posted(NamedTuple):
    work: Work
    message: Message
    memory: Any


def rank(args: argparse.Namespace) -> None:
    """One of the two; prints JSON."""
    die_with_parent()
    me, peer, count = args.rank, 1 - args.rank, args.messages
    machine = "one" if args.kind == "shm" else f"of {me}"
    endpoint = Endpoint(me, "127.0.0.1", machine, FolderRendezvous(Path(args.folder)), TIMEOUT)
    endpoint.connect([peer])
    engine = endpoint.engine
    pattern = memoryview(random.Random(args.seed).randbytes(2 * LARGEST))
    kept = (ctypes.c_char * len(pattern)).from_buffer_copy(pattern)
    origin = ctypes.addressof(kept)
    rng = random.Random(f"{args.seed} when {me}")
    spare = [(ctypes.c_char * LARGEST)() for _ in range(AHEAD + 1)]
    receives: deque[Posted] = deque()
    sends: deque[Work] = deque()
    coming, wrong, notes = messages(args.seed, peer, count), 0, []

    def post() -> None:
        for message in coming:
            memory = spare.pop()
            at = ctypes.addressof(memory)
            work = engine.receive(peer, message.tag, at, message.size)
            receives.append(Posted(work, message, memory))
            return

    def take() -> None:
        nonlocal wrong
        work, (_, size, at), memory = receives.popleft()
        assert work.wait(TIMEOUT), "a message has not come"
        assert not work.error(), work.error()
        wrong += memoryview(memory).cast("B")[:size] != pattern[at : at + size]
        spare.append(memory)

    began = time.monotonic()
    for number, (tag, size, at) in enumerate(messages(args.seed, me, count)):
        sends.append(engine.send(peer, tag, origin + at, size))
        post()
        ahead = rng.randrange(1, AHEAD)
        while len(receives) > ahead:
            take()
        while len(sends) > ahead:
            work = sends.popleft()
            assert work.wait(TIMEOUT), "a message has not gone"
            assert not work.error(), work.error()
        if number % max(1, count // NOTES) == 0:
            notes.append(_memory(engine))
    while receives:
        take()
    for work in sends:
        assert work.wait(TIMEOUT), "a message has not gone"
    seconds = time.monotonic() - began
    notes.append(_memory(engine))
    counts = engine.counts(peer)
    row = {
        "rank": me, "kind": args.kind, "messages": counts.received, "wrong": wrong,
        "bytes": counts.bytes_received, "seconds": seconds, "kept": counts.kept,
        "memory MB": [note[0] for note in notes], "arena MB": [note[1] for note in notes],
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    sys.stdin.readline()  # both have to be through before one of them goes
    endpoint.close()


def _memory(engine: Any) -> tuple[float, float]:
    """MB that this process has for itself, and that its messages have taken."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    arena = os.fstat(engine.arena_fd()).st_blocks * 512
    return kib["Pss_Anon"] / 1024, arena / 2**20


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000, help="each way")
    parser.add_argument("--kind", choices=("tcp", "shm"), default="tcp")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.rank is not None:
        return rank(args)
    print(f"seed {args.seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        own = ["--folder", folder, "--seed", str(args.seed)]
        running = [
            subprocess.Popen(
                [sys.executable, __file__, *words, *own, "--rank", str(number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in (0, 1)
        ]
        try:
            lines = [one.stdout.readline() for one in running if one.stdout is not None]
            for one in running:
                one.communicate("over\n", TIMEOUT)
        finally:
            for one in running:
                one.kill()
                one.wait()
    print(*lines, sep="", end="")
    if not all(lines):
        raise SystemExit("a rank has failed")


if __name__ == "__main__":
    main(sys.argv[1:])
