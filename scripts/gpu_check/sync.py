"""Part `sync`: what waits for the whole GPU, while messages are outstanding whose peer is late.

Rank 0 has posted a receive and has sent a message; rank 1 does its part when rank 0 says that the
call is over, or a second later. So a call that waits for the peer takes that second, and fails.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_check.rank_fixture import CYCLES, RankFixture, pattern, timed
from gpu_check.ranks import Deadline, run_ranks
from gpu_check.result import Result, many, ms
from gpu_check.target import CPU, FAKE, Target

LATE = 1.0  # seconds
LEAST = 0.5  # of these: who took longer has waited for the peer
SIZES = (256 << 10, 32 << 20)  # bytes of the messages; the first one of a rehearsal
QUEUES = (1, 32)
WAITS = 600  # kernels that stand for a receive on the GPU, where a fault is planted
KERNELS = ("frac", "trunc", "atan", "cosh", "log1p", "expm1", "asinh", "sign")  # compiled ones


def run(found: Result, target: Target, work: Path, deadline: Deadline, options: Any) -> None:
    if target.kind == CPU:
        found.why_not = "torch has no CUDA build here, so nothing waits for a GPU"
        return
    machine = {"kernel_us": 2000, "lazy_loading": 1} if target.kind == FAKE else {}
    sizes = SIZES[:1] if target.kind == FAKE else SIZES
    table: dict[str, list[float]] = {}
    names = [(queues, size) for queues in QUEUES for size in sizes]
    for queues in QUEUES:
        given = {"sizes": sizes, "plant": options.plant}
        rows, _ = run_ranks(
            target, "sync", work, deadline, ranks=2, options=given, queues=queues, **machine
        )
        for row in rows:
            name = f"{row['call']}, {row['bytes'] >> 10} KiB under way, {many(queues, 'queue')}"
            found.check(row["seconds"] < LEAST * LATE, f"{name}: took {ms(row['seconds'])}, as "
                        "long as the peer was late")  # fmt: skip
            found.check(row["well"], f"{name}: other bytes arrived then")
            table.setdefault(row["call"], []).append(row["seconds"])
    worst = max(table, key=lambda call: max(table[call]))
    found.figures += [
        f"{len(table)} calls, each with a message posted and one sent, at "
        f"{' and '.join(many(queues, 'queue') for queues in QUEUES)}",
        f"the longest: {worst}, {ms(max(table[worst]))}; the peer was {LATE:g} s late",
    ]
    columns = [f"{many(q, 'queue')}, {size >> 10} KiB" for q, size in names]
    found.table("Calls while messages are outstanding, ms", ("call", *columns), [
        [call, *(f"{1e3 * x:.2f}" for x in seconds)] for call, seconds in table.items()
    ])  # fmt: skip


# On a rank.


def on_rank(fixture: RankFixture, sizes: list[int], plant: bool) -> list[dict[str, Any]]:
    rows = []
    kernels = iter(KERNELS)
    with fixture.messages("tcp") as (transport, _):
        for size in sizes:
            for call in ("nothing", *_calls(fixture, kernels)):  # the first one warms up
                pair = _Outstanding(fixture, transport, size, call)
                if fixture.rank == 1:
                    pair.be_late()
                else:
                    run = _calls(fixture, kernels).get(call, lambda: None)
                    row = pair.measure(run, plant)
                    rows += [row] if call != "nothing" else []
    return rows


def _calls(fixture: RankFixture, kernels: Any) -> dict[str, Callable[[], Any]]:
    here = fixture.device
    small = torch.full((8,), 0.5)

    def free() -> None:
        memory = torch.empty(96 << 20, dtype=torch.uint8, device=here)
        del memory
        torch.cuda.empty_cache()

    def event() -> None:
        mark = torch.cuda.Event()
        mark.record()
        mark.synchronize()

    def first_launch() -> None:
        getattr(torch, next(kernels))(small.to(here))
        fixture.finish()

    return {
        "torch.cuda.synchronize": torch.cuda.synchronize,
        "cudaFree (empty_cache)": free,
        "first launch of a kernel": first_launch,
        "event.synchronize": event,
        "a pageable copy": lambda: small.to(here).cpu(),
        "pinning": lambda: torch.empty(24 << 20, dtype=torch.uint8, pin_memory=True),
        "a new stream": lambda: torch.cuda.Stream(priority=-1).synchronize(),
    }


class _Outstanding:
    """A message each way between two ranks, of which rank 1 is late."""

    def __init__(self, fixture: RankFixture, transport: Any, size: int, call: str) -> None:
        self.fixture, self.transport = fixture, transport
        self.name = f"{size} {call}"
        seed = abs(hash_of(self.name))
        self.tag, self.size, self.call = seed % (1 << 20), size, call
        self.mine = pattern(size, seed + fixture.rank).to(fixture.device)
        self.theirs = pattern(size, seed + 1 - fixture.rank)
        self.into = torch.zeros_like(self.mine)
        fixture.finish()
        fixture.meet(f"ready {self.name}")

    def measure(self, call: Callable[[], Any], plant: bool) -> dict[str, Any]:
        fixture = self.fixture
        receive = self.transport.irecv(self.into, 1, self.tag)
        send = self.transport.isend(self.mine, 1, self.tag)
        if plant:
            for _ in range(WAITS):  # as a receive that waits on the GPU does
                torch.cuda._sleep(4 * CYCLES)
        fixture.signal(f"outstanding {self.name}")
        seconds = timed(call)
        fixture.signal(f"over {self.name}")
        receive.wait(fixture.patience)
        send.wait(fixture.patience)
        same = torch.equal(self.into.cpu(), self.theirs)
        return {"call": self.call, "bytes": self.size, "seconds": seconds, "well": same}

    def be_late(self) -> None:
        fixture = self.fixture
        fixture.wait_for(f"outstanding {self.name}")
        fixture.wait_for(f"over {self.name}", LATE)
        receive = self.transport.irecv(self.into, 0, self.tag)
        self.transport.isend(self.mine, 0, self.tag).wait(fixture.patience)
        receive.wait(fixture.patience)


def hash_of(text: str) -> int:
    """The same in all processes."""
    return sum((i + 1) * ord(letter) for i, letter in enumerate(text))
