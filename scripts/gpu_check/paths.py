"""Part `paths`: messages from GPU to GPU through the hosts' memory, alone and beside compute.

Every byte is compared. A message's times are taken where its bytes are: the producer's mark, the
engine's stamps (out of the sender's GPU, in the receiver's pinned memory), the receiver's mark.
Then long compute is launched behind a message, which may hold up neither the message nor itself.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_check.rank_fixture import RankFixture, pattern
from gpu_check.ranks import Deadline, run_ranks
from gpu_check.result import Result, many, ms
from gpu_check.target import CPU, FAKE, Target

from megatron_adaptra.base.errors import PeerLost
from megatron_adaptra.transport.engine.rails import rails

SIZES = (64 << 10, 1 << 20, 16 << 20, 64 << 20)
SMALL = SIZES[:2]  # of a rehearsal
KINDS = ("shm", "tcp", "verbs")
QUEUES = (1, 32)
TURNS, MANY = 5, 8  # messages one by one, and at once
BUSY = 0.3  # seconds of compute behind a message
BESIDE = 4 << 20  # bytes of that message
HELD = 0.5  # of the compute's time: a message that took so long has waited for it
SLOWER = 1.5  # compute beside messages against compute alone


def run(found: Result, target: Target, work: Path, deadline: Deadline, options: Any) -> None:
    sizes = SIZES if target.kind not in (CPU, FAKE) else SMALL
    given = {"sizes": sizes, "nccl": target.nccl(2), "plant": options.plant}
    machine = {"kernel_us": 500} if target.kind == FAKE else {}
    copied: list[str] = []  # why, by run and rank
    rows, columns = [], ["queues, way", "MiB", "one, ms", "out", "way", "in", "several, GB/s"]
    against = "NCCL" if target.nccl(2) else "cudaMemcpy, out and in"
    if target.kind == CPU:
        against = ""
        found.left_out.append("GPUs: messages of the host's memory alone")
    elif not target.nccl(2):
        found.left_out.append("NCCL's own, which refuses two ranks on one GPU; "
                              "that GPU is shared, so contexts take turns on it")  # fmt: skip
    for queues in QUEUES if target.gpus else QUEUES[:1]:
        both = run_ranks(target, "paths", work, deadline, ranks=2, options=given, queues=queues,
                         **machine)  # fmt: skip
        if not both[0]["rails"] and queues == QUEUES[0]:
            found.left_out.append("RDMA: there is no active port")
        copied += [mine["copied"] for mine in both if mine["copied"]]
        for rank, mine in enumerate(both):
            found.check(not mine["lost"], f"no messages over RDMA: {mine['lost']}")
            rows += [_row(queues, rank, one, against) for one in mine["received"]]
            wrong = [one for one in mine["received"] if one["wrong"]]
            found.check(not wrong, f"{many(queues, 'queue')}, to rank {rank}: other bytes in "
                        f"{len(wrong)} of {len(mine['received'])} kinds of messages")  # fmt: skip
        if target.gpus:
            _beside(found, queues, both)
    best = max(float(row[-2 if against else -1]) for row in rows)
    found.figures.insert(0, f"{len(rows)} kinds of messages with all their bits, "
                         f"up to {best:.2f} GB/s")  # fmt: skip
    if copied:
        found.figures.append(f"the engine's memory is not pinned: {copied[0]}")
    found.table("Messages", [*columns, *([f"{against}, GB/s"] if against else [])], rows)


def _row(queues: int, rank: int, one: dict[str, Any], against: str) -> list[str]:
    size = one["bytes"]
    times = [f"{1e3 * one[name]:.3f}" for name in ("total", "out", "way", "in")]
    rates = [f"{one['rate'] / 1e9:.2f}"]
    if against:
        rates.append(f"{one['beside'] / 1e9:.2f}")
    return [f"{queues}, {one['kind']} {1 - rank} to {rank}", f"{size / 2**20:g}", *times, *rates]


def _beside(found: Result, queues: int, both: list[dict[str, Any]]) -> None:
    name = many(queues, "queue")
    rows = []
    for rank, one in enumerate(item["beside"] for item in both):
        least = HELD * one["compute"]
        found.check(one["out"] < least, f"{name}: a message of rank {rank} left its GPU after "
                    f"{ms(one['out'])}, behind compute of {ms(one['compute'])} launched "
                    "after it")  # fmt: skip
        found.check(one["with"] < SLOWER * one["compute"], f"{name}: compute of rank {rank} took "
                    f"{ms(one['with'])} beside messages, {ms(one['compute'])} alone")  # fmt: skip
        rows.append([f"{name}, rank {rank}", *(f"{1e3 * one[key]:.2f}" for key in
                     ("compute", "with", "out", "idle_out", "in", "idle_in"))])  # fmt: skip
    worst = max(item["beside"]["out"] for item in both)
    behind = max(item["beside"]["in"] for item in both)
    found.figures.append(
        f"{name}: out within {ms(worst)} beside compute, "
        f"in {ms(behind)} behind compute launched before"
    )
    columns = ("queues", "compute alone", "with messages", "out beside compute", "out alone",
               "in beside compute", "in alone")  # fmt: skip
    found.table(f"Beside compute, {name}, ms", columns, rows)


# On a rank.


def on_rank(fixture: RankFixture, sizes: list[int], nccl: bool, plant: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"received": [], "lost": "", "copied": "", "rails": len(rails())}
    if nccl:
        _open_nccl(fixture)
    for kind in KINDS if rails() else KINDS[:2]:
        try:
            with fixture.messages(kind) as (transport, staging):
                for number, size in enumerate(sizes):
                    messages = _Paths(fixture, transport, kind, size, 1000 * number, plant)
                    found["received"].append(messages.measure())
                if fixture.on_gpu and kind == KINDS[0]:
                    found["beside"] = _Beside(fixture, transport).measure()
                if staging is not None:
                    memory = staging.memory()
                    found["copied"] = found["copied"] or memory.unpinned or memory.copied
        except PeerLost as error:  # the other kinds have still to be seen
            if kind != "verbs":
                raise
            found["lost"] = str(error)
    for row in found["received"]:
        row["beside"] = (_nccl_rate if nccl else _copy_rate)(fixture, row["bytes"])
    if nccl:
        torch.distributed.destroy_process_group()
    return found


class _Paths:
    """Messages of one size, both ways at once."""

    def __init__(
        self, fixture: RankFixture, transport: Any, kind: str, size: int, tag: int, plant: bool
    ) -> None:
        self.fixture, self.transport, self.kind, self.size = fixture, transport, kind, size
        self.tag, self.wrong = tag, 0
        self.mine = [pattern(size, 10 * tag + fixture.rank + 2 * i) for i in range(2)]
        self.theirs = [pattern(size, 10 * tag + 1 - fixture.rank + 2 * i) for i in range(2)]
        if plant:
            self.mine[1][size // 2] += 1  # a byte that goes wrong on its way
        self.out = [x.to(fixture.device) for x in self.mine]
        self.into = [torch.zeros_like(self.out[0]) for _ in range(MANY)]

    def measure(self) -> dict[str, Any]:
        ones = [self.turn(i, 1) for i in range(TURNS)][1:]
        several = [self.turn(TURNS + i, MANY) for i in range(2)][1]
        named = {key: median(one[key] for one in ones) for key in ("total", "out", "way", "in")}
        rate = MANY * self.size / several["total"]
        return {"kind": self.kind, "bytes": self.size, "wrong": self.wrong, "rate": rate, **named}

    def turn(self, number: int, count: int) -> dict[str, float]:
        """`count` messages at once each way; the last one's times."""
        fixture, peer = self.fixture, 1 - self.fixture.rank
        tags = [self.tag + 20 * number + i for i in range(count)]
        name = f"{self.kind} {self.size} {number}"
        receives = [self.transport.irecv(self.into[i], peer, tag) for i, tag in enumerate(tags)]
        fixture.together(name)
        begin = fixture.gpu.mark() if fixture.on_gpu else None
        began = time.monotonic()
        sends = [self.transport.isend(self.out[i % 2], peer, tag) for i, tag in enumerate(tags)]
        stamps = [receive.wait(fixture.patience) for receive in receives][-1]
        end = fixture.gpu.mark() if fixture.on_gpu else None
        over = time.monotonic()
        for send in sends:
            send.wait(fixture.patience)
        if begin is not None:
            began = fixture.passed(begin)
        # The sender knows when its producer was over; both clocks are this machine's one.
        fixture.store.set(f"began {name} {fixture.rank}", repr(began))
        theirs = float(fixture.store.get(f"began {name} {peer}"))
        if end is not None:
            over = fixture.passed(end)
        for i in range(count):
            self.wrong += not torch.equal(self.into[i].cpu(), self.theirs[i % 2])
            self.into[i].zero_()
        return {"total": over - theirs, "out": max(0.0, stamps.sent - theirs),
                "way": stamps.completed - stamps.sent, "in": over - stamps.completed}  # fmt: skip


class _Beside:
    """A message with long compute behind it: where it leaves, and where it arrives.

    Ranks take turns with their compute, for they may share a GPU.
    """

    def __init__(self, fixture: RankFixture, transport: Any) -> None:
        self.fixture, self.transport = fixture, transport
        self.message = torch.zeros(BESIDE, dtype=torch.uint8, device=fixture.device)
        self.number = 0

    def measure(self) -> dict[str, float]:
        fixture = self.fixture
        for rank in range(fixture.ranks):  # a GPU that both use is slower meanwhile
            if rank == fixture.rank:
                fixture.calibrate()
            fixture.meet(f"calibrated {rank}")
        self.exchange(None)  # pins
        mine: dict[str, float] = {}
        for rank in range(fixture.ranks):
            idle = self.exchange(None)
            times = self.exchange(rank)
            if rank == fixture.rank:
                begin, end = fixture.busy(BUSY)
                compute = fixture.passed(end) - fixture.passed(begin)
                mine = {**times, "compute": compute, "idle_out": idle["out"], "idle_in": idle["in"]}
            fixture.meet(f"turn of {rank}")
        return mine

    def exchange(self, computing: int | None) -> dict[str, float]:
        """One message each way; rank `computing` launches compute behind its own."""
        fixture, peer, found = self.fixture, 1 - self.fixture.rank, {}
        self.number += 1
        tag, name = 500_000 + self.number, f"beside {self.number}"
        into = torch.empty_like(self.message)
        receive = self.transport.irecv(into, peer, tag)
        fixture.finish()
        fixture.meet(name)
        if computing == peer:  # its message and its compute come first
            fixture.wait_for(f"{name} computes")
        produced = fixture.gpu.mark()
        send = self.transport.isend(self.message, peer, tag)
        if computing == fixture.rank:
            # The receive's copy comes while this runs; on a stream of its own its end is seen.
            begin, end = fixture.busy(BUSY)
            fixture.signal(f"{name} computes")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            stamps = receive.wait(fixture.patience)
            arrived = fixture.gpu.mark()
        send.wait(fixture.patience)
        found["in"] = max(0.0, fixture.passed(arrived) - stamps.completed)
        fixture.store.set(f"{name} sent to {fixture.rank}", repr(stamps.sent))
        left = float(fixture.store.get(f"{name} sent to {peer}"))
        found["out"] = max(0.0, left - fixture.passed(produced))
        if computing == fixture.rank:
            found["with"] = fixture.passed(end) - fixture.passed(begin)
        fixture.finish()
        return found


def _open_nccl(fixture: RankFixture) -> None:
    torch.distributed.init_process_group(
        "nccl", store=torch.distributed.PrefixStore("nccl", fixture.store), rank=fixture.rank,
        world_size=fixture.ranks, device_id=fixture.device,
    )  # fmt: skip
    one = torch.zeros(1, device=fixture.device)
    _nccl(fixture, one, one.clone())


def _nccl(fixture: RankFixture, out: torch.Tensor, into: torch.Tensor) -> None:
    peer, op = 1 - fixture.rank, torch.distributed.P2POp
    ops = [op(torch.distributed.isend, out, peer), op(torch.distributed.irecv, into, peer)]
    for work in torch.distributed.batch_isend_irecv(ops):
        work.wait()


def _nccl_rate(fixture: RankFixture, size: int) -> float:
    """Bytes per second each way, both ways at once."""
    out = torch.zeros(size, dtype=torch.uint8, device=fixture.device)
    into = torch.empty_like(out)
    _nccl(fixture, out, into)
    begin = fixture.gpu.mark()
    for _ in range(MANY):
        _nccl(fixture, out, into)
    end = fixture.gpu.mark()
    fixture.finish()
    return MANY * size / max(1e-9, fixture.passed(end) - fixture.passed(begin))


def _copy_rate(fixture: RankFixture, size: int) -> float:
    """Bytes per second that go out to pinned memory and back in."""
    if not fixture.on_gpu:
        return 0.0
    memory = torch.zeros(size, dtype=torch.uint8, device=fixture.device)
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    pinned.copy_(memory, non_blocking=True)
    begin = fixture.gpu.mark()
    for _ in range(MANY):
        pinned.copy_(memory, non_blocking=True)
        memory.copy_(pinned, non_blocking=True)
    end = fixture.gpu.mark()
    fixture.finish()
    return MANY * size / max(1e-9, fixture.passed(end) - fixture.passed(begin))
