"""Part `pieces`: large messages from GPU to GPU, whole and in pieces of several sizes.

A piece is copied out of the sender's GPU while the one before it is on its way, and into the
receiver's while the next one is. What is best depends on the driver, PCIe and the network.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_check.rank_fixture import RankFixture, pattern
from gpu_check.ranks import Deadline, run_ranks
from gpu_check.result import Result
from gpu_check.target import CPU, GPU, Target

SIZES, SMALL = (16, 64), (2,)  # MiB of a message; of a rehearsal
PIECES = (64, 32, 16, 8, 4, 2, 1)  # MiB
KINDS = ("shm", "tcp")
WAYS = {"0 to 1": (0,), "both": (0, 1)}  # who sends
TURNS, FEW = 7, 2  # of each; of a rehearsal
MIB = 1 << 20


def run(found: Result, target: Target, work: Path, deadline: Deadline, options: Any) -> None:
    if target.kind == CPU:
        found.why_not = "there is no GPU whose copies could overlap"
        return
    if target.gpus < 2:
        found.left_out.append("a GPU each: contexts take turns on the one that there is")
    sizes, turns = (SIZES, TURNS) if target.kind == GPU else (SMALL, FEW)
    machine = {} if target.kind == GPU else {"kernel_us": 500}
    given = {"sizes": sizes, "turns": turns, "plant": options.plant}
    both = run_ranks(target, "pieces", work, deadline, ranks=2, options=given, queues=32, **machine)
    wrong = [name for mine in both for name in mine["wrong"]]
    kinds = sum(len(mine["ms"]) for mine in both)
    found.check(not wrong, f"other bytes in {len(wrong)} of {kinds} kinds of messages")
    rows = []
    for kind in KINDS:
        for size in sizes:
            for way, senders in WAYS.items():
                times = {
                    piece: max(both[1 - s]["ms"][f"{kind} {size} {way} {piece}"] for s in senders)
                    for piece in PIECES
                }
                rows.append([f"{kind}, {size} MiB, {way}", *(f"{times[p]:.2f}" for p in PIECES)])
                best = min(times, key=lambda piece: times[piece])
                if size == sizes[-1]:
                    found.figures.append(f"{kind}, {way}: {size} MiB take {times[best]:.1f} ms in "
                                         f"pieces of {best} MiB, {times[PIECES[0]]:.1f} "
                                         "whole")  # fmt: skip
    columns = ("ms, pieces of MiB", *map(str, PIECES))
    found.table(f"Messages in pieces, median of {turns}", columns, rows)


# On a rank.


def on_rank(fixture: RankFixture, sizes: Sequence[int], turns: int, plant: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"wrong": [], "ms": {}}
    for kind in KINDS:
        with fixture.messages(kind) as (_, _staging):
            for size in sizes:
                exchange = _Exchange(fixture, size * MIB, plant)
                for turn in range(turns + 1):  # the first one pins; all sizes take turns
                    for piece in PIECES:
                        with fixture.opened(f"{kind} {size} {piece} {turn}", piece * MIB) as open_:
                            for way, senders in WAYS.items():
                                name = f"{kind} {size} {way} {piece}"
                                took = exchange.measure(open_, senders, f"{name} {turn}")
                                if turn and took is not None:
                                    found["ms"].setdefault(name, []).append(1e3 * took)
                                if exchange.wrong and name not in found["wrong"]:
                                    found["wrong"].append(name)
    found["ms"] = {name: median(times) for name, times in found["ms"].items()}
    return found


class _Exchange:
    """Messages of `nbytes` between the two ranks."""

    def __init__(self, fixture: RankFixture, nbytes: int, plant: bool) -> None:
        self.fixture, self.wrong = fixture, False
        mine, theirs = (pattern(nbytes, rank) for rank in (fixture.rank, 1 - fixture.rank))
        if plant:
            mine[nbytes // 2] += 1  # a byte that goes wrong on its way
        self.out, self.expected = mine.to(fixture.device), theirs
        self.into = torch.empty_like(self.out)

    def measure(self, transport: Any, senders: Sequence[int], name: str) -> float | None:
        """Seconds from the peer's send until the message is on this GPU; None: nothing came."""
        fixture, me, peer = self.fixture, self.fixture.rank, 1 - self.fixture.rank
        tag, receive, send = 1 + len(senders), None, None
        self.wrong = False
        self.into.zero_()
        if peer in senders:
            receive = transport.irecv(self.into, peer, tag)
        fixture.finish()
        fixture.together(name)
        begun = time.monotonic()
        if me in senders:
            send = transport.isend(self.out, peer, tag)
        took = None
        if receive is not None:
            receive.wait(fixture.patience)
            end = fixture.passed(fixture.gpu.mark())
        if send is not None:
            send.wait(fixture.patience)
        # Both clocks are this machine's one.
        fixture.store.set(f"begun {name} {me}", repr(begun))
        if receive is not None:
            took = end - float(fixture.store.get(f"begun {name} {peer}"))
            self.wrong = not torch.equal(self.into.cpu(), self.expected)
        fixture.meet(f"over {name}")
        return took
