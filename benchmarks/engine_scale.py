"""What many ranks of the engine cost on one machine: `benchmarks/engine_scale.py --ranks 64`.

Every rank is an endpoint; several share a process, so that figures are the engine's alone. Each
connects to its neighbours in a ring or to all others, they exchange a message each way, and then
they are idle for some seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from folder_rendezvous import FolderRendezvous

from megatron_adaptra.base.processes import die_with_parent
from megatron_adaptra.transport.engine.endpoint import CONNECTIONS, Endpoint

TIMEOUT = 120.0
SIZE = 4096


class Rank:
    """One endpoint of the job, and its peers."""

    def __init__(self, number: int, args: argparse.Namespace) -> None:
        self.number, count = number, args.ranks
        ring = {(number - 1) % count, (number + 1) % count}
        self.peers = sorted((ring if args.peers == "ring" else set(range(count))) - {number})
        self.paths = 1 if args.kind == "shm" else CONNECTIONS
        machine = "one" if args.kind == "shm" else f"of {number}"
        rendezvous = FolderRendezvous(Path(args.folder))
        self.endpoint = Endpoint(number, "127.0.0.1", machine, rendezvous, TIMEOUT)

    def connect(self) -> float:
        began = time.monotonic()
        self.endpoint.connect(self.peers, TIMEOUT)
        while any(self.endpoint.engine.counts(peer).paths < self.paths for peer in self.peers):
            time.sleep(0.01)
        return time.monotonic() - began

    def exchange(self) -> float:
        """A message to each peer, and one from there: what it holds is looked at."""
        began, engine = time.monotonic(), self.endpoint.engine
        got = {peer: (ctypes.c_char * SIZE)() for peer in self.peers}
        sent = (ctypes.c_char * SIZE).from_buffer_copy(_content(self.number))
        works = []
        for peer, memory in got.items():
            works.append(engine.receive(peer, 7, ctypes.addressof(memory), SIZE))
            works.append(engine.send(peer, 7, ctypes.addressof(sent), SIZE))
        for work in works:
            assert work.wait(TIMEOUT), "a message has not come"
            assert not work.error(), work.error()
        assert all(memory.raw == _content(peer) for peer, memory in got.items())
        return time.monotonic() - began

    def close(self) -> float:
        began = time.monotonic()
        self.endpoint.close()
        return time.monotonic() - began


def _content(rank: int) -> bytes:
    return rank.to_bytes(4, "little") * (SIZE // 4)


def process(args: argparse.Namespace) -> None:
    """Some ranks of the job; a phase begins when a line comes, and ends with a line of JSON."""
    die_with_parent()
    numbers = range(args.process, args.ranks, args.processes)
    before = _taken()
    for phase in map(str.strip, sys.stdin):
        if phase == "open":
            ranks = [Rank(number, args) for number in numbers]
            answer: Any = None
        elif phase == "idle":
            spent = time.process_time()
            time.sleep(args.idle)
            answer = (time.process_time() - spent) / args.idle / len(ranks)
        elif phase == "taken":
            answer = {what: (now - before[what]) / len(ranks) for what, now in _taken().items()}
        else:
            answer = _all_at_once([getattr(rank, phase) for rank in ranks])
        print(json.dumps(answer), flush=True)


def _all_at_once(jobs: Sequence[Any]) -> list[float]:
    done: list[float] = []
    threads = [threading.Thread(target=lambda job=job: done.append(job())) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == len(jobs)
    return done


def _taken() -> dict[str, float]:
    names = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{name}"))
    kib = {
        line.split(":")[0]: int(line.split()[1])
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    }
    return {
        "descriptors": len(names),
        "sockets": sum(name.startswith("socket:") for name in names),
        "threads": len(os.listdir("/proc/self/task")),
        "memory MB": kib["Pss"] / 1024,
    }


@contextlib.contextmanager
def job(words: Sequence[str], processes: int) -> Iterator[Any]:
    """Its processes; `phase(name)` has all of them do it, and returns what they say."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as undo:
        running = []
        for index in range(processes):
            own = ["--process", str(index), "--folder", folder]
            one = subprocess.Popen(
                [sys.executable, __file__, *words, *own],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            undo.enter_context(one)
            undo.callback(one.kill)
            running.append(one)

        def phase(name: str) -> list[Any]:
            for one in running:
                assert one.stdin is not None
                print(name, file=one.stdin, flush=True)
            answers = []
            for one in running:
                assert one.stdout is not None
                line = one.stdout.readline()
                if not line:
                    raise SystemExit(f"a process has ended in phase {name!r}")
                answers.append(json.loads(line))
            return answers

        yield phase
        for one in running:
            assert one.stdin is not None
            one.stdin.close()
            one.wait(TIMEOUT)


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--kind", choices=("tcp", "shm"), default="tcp")
    parser.add_argument("--peers", choices=("ring", "all"), default="all")
    parser.add_argument("--idle", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.process is not None:
        return process(args)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    row: dict[str, Any] = {"ranks": args.ranks, "kind": args.kind, "peers": args.peers}
    with job(words, args.processes) as phase:
        phase("open")
        for name in ("connect", "exchange"):
            took = [seconds for each in phase(name) for seconds in each]
            row[f"{name} s"], row[f"{name} s, last"] = median(took), max(took)
        idle = phase("idle")
        taken = phase("taken")
        row.update({what: median(each[what] for each in taken) for what in taken[0]})
        row["idle share of a core"] = max(idle)
        row["close s, last"] = max(seconds for each in phase("close") for seconds in each)
    print(json.dumps(row))


if __name__ == "__main__":
    main(sys.argv[1:])
