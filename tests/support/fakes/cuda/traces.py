"""Traces of the calls that reach the fake CUDA and NCCL: reading and comparing them.

A call: its name, the stream's ordinal, its size and its peer; no addresses and no times. Two runs
are compared thread by thread, since threads of one process are not ordered. A thread is known by
its name and by how many of that name came before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

# What a thread asks again and again until something has happened, so its number is chance.
POLLED = frozenset(
    ("cudaEventQuery", "cudaStreamQuery", "cuEventQuery", "cuStreamQuery", "ncclCommGetAsyncError")
)
# torch keeps events and memory for reuse: a call finds some, or not, as others have left it.
POOLED = frozenset(("cudaEventCreate", "cudaEventDestroy", "cudaMalloc", "cudaHostAlloc"))
# Each communicator is given up by a thread of its own, at once with others.
ENDING = frozenset(("ncclGroupStart", "ncclGroupEnd", "ncclCommAbort", "ncclCommDestroy"))
# Threads of torch's that only look after others (ProcessGroupNCCL's watchdog and heartbeat).
WATCHING = ("pt_nccl_watchdg", "pt_nccl_heartbt")
MARK = "mark"


@dataclass(frozen=True)
class Call:
    name: str
    stream: str  # the ordinal of its first use in the thread, or "-"
    size: str
    more: str  # peer and communicator, or kernel and its shape

    def __str__(self) -> str:
        return " ".join(filter(lambda x: x not in ("", "-"), self.words()))

    def words(self) -> tuple[str, ...]:
        stream = "" if self.stream == "-" else f"stream {self.stream}"
        size = "" if self.size == "-" else f"{self.size} bytes"
        return self.name, stream, size, self.more


@dataclass
class Rank:
    """One process: the calls of each thread, in order, and names of kernels."""

    threads: dict[str, list[Call]] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)
    # How often each call was made, by all threads, from one mark to the next; polling apart.
    iterations: list[Counter[str]] = field(default_factory=list)

    def counts(self) -> Counter[str]:
        return Counter(call.name for calls in self.threads.values() for call in calls)


def read(path: Path, passed: Collection[int] = ()) -> Rank:
    """The trace in `path`, without calls of the iterations in `passed`."""
    rank, names, seen = Rank(), dict[str, str](), Counter[str]()
    streams: dict[str, dict[str, str]] = {}
    for line in path.read_text(errors="replace").splitlines():
        if line.startswith("# thread "):
            _, _, number, name = line.split(" ", 3)
            key = f"{name} {seen[name]}" if seen[name] else name
            seen[name] += 1
            names[number] = key
            rank.threads[key], streams[key] = [], {}
        elif line.startswith("# kernel "):
            _, _, number, name = line.split(" ", 3)
            rank.kernels[number] = name
        elif line:
            thread, call, stream, size, more = line.split("\t")
            if call == MARK:
                rank.iterations.append(Counter())
            elif rank.iterations and call not in POLLED:
                rank.iterations[-1][call] += 1
            if len(rank.iterations) - 1 in passed:
                continue
            known = streams[names[thread]]
            if stream != "-":
                stream = known.setdefault(stream, str(len(known)))
            rank.threads[names[thread]].append(Call(call, stream, size, more))
    return rank


def read_all(folder: Path, passed: Collection[int] = ()) -> dict[str, Rank]:
    """`rank-0` -> its trace. Processes that are no ranks, as torchrun's own, are left out."""
    found = {path.stem: read(path, passed) for path in sorted(folder.glob("rank-*.trace"))}
    if not found:
        raise FileNotFoundError(f"{folder}: no rank-*.trace; was --trace given?")
    return found


def normal(rank: Rank, without: Collection[str] = ()) -> dict[str, list[Call]]:
    """What two runs of one program have in common."""
    left_out = POLLED | POOLED | set(without)
    found = {}
    for thread, calls in rank.threads.items():
        if thread.startswith(WATCHING):
            continue
        kept = [call for call in calls if call.name not in left_out]
        if any(call.name not in ENDING for call in kept):
            found[thread] = kept
    return found


def differences(first: Rank, second: Rank, without: Collection[str] = ()) -> Iterator[str]:
    """For each thread that differs, the first call that does, with the three before it."""
    ours, theirs = normal(first, without), normal(second, without)
    for thread in sorted(set(ours) | set(theirs)):
        a, b = ours.get(thread, []), theirs.get(thread, [])
        if a == b:
            continue
        at = next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), None)
        at = min(len(a), len(b)) if at is None else at
        before = "".join(f"\n    {call}" for call in a[max(0, at - 3) : at])
        one = str(a[at]) if at < len(a) else "no more calls"
        two = str(b[at]) if at < len(b) else "no more calls"
        names = {**second.kernels, **first.kernels}
        for number, name in names.items():
            one, two = one.replace(number, name), two.replace(number, name)
        place = f"thread {thread}, call {at} of {len(a)} and {len(b)}, after{before}"
        yield f"{place}\n  {one}\n  {two}"


def compare(
    first: Path, second: Path, without: Collection[str] = (), passed: Collection[int] = ()
) -> list[str]:
    """The differences of two folders of traces, rank by rank; empty if there are none.

    `without`: names of calls, and `passed`: iterations, that are not compared.
    """
    ours, theirs = read_all(first, passed), read_all(second, passed)
    if set(ours) != set(theirs):
        return [f"ranks {sorted(ours)} and {sorted(theirs)}"]
    return [
        f"{name}: {text}"
        for name in ours
        for text in differences(ours[name], theirs[name], without)
    ]
