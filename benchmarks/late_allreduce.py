"""All-reduces with late ranks, by plan and by gloo: `python benchmarks/late_allreduce.py`.

A ring and the other plans go over the plugin's engine, native is torch's over gloo; they take turns
on the same calls. Times count from the arrival of the last rank to the end of the last one. In
`direct` each piece has an owner, and late ranks own nothing, also where they are late by 0 ms. With
--host, as root, each rank is a host of `adaptra netlab`: where the ring does not take what its own
model predicts, up to 5 %, this machine keeps no such rate, and figures count for less. On a busy
machine: `chrt -r 1 python benchmarks/late_allreduce.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from common import equal_ports, markdown

from megatron_adaptra.base.units import parse_bytes, parse_seconds
from megatron_adaptra.cli.output import Table, show_table
from megatron_adaptra.emulate.rules import parse_port_rules
from megatron_adaptra.execute.planned.connected import Connected
from megatron_adaptra.ir.collective import CollectivePlan, Goal
from megatron_adaptra.model.all_reduce_forms import (
    ALGORITHMS,
    SHARDED,
    AllReduce,
    best_shard_pieces,
)
from megatron_adaptra.netlab.ports import PORT_MTU
from megatron_adaptra.plan.reductions.builders import sharded_plan
from megatron_adaptra.plan.reductions.sized import (
    FEWEST_RANKS,
    MESSAGE,
    for_gradients,
    for_shards,
    sized,
)
from megatron_adaptra.sim.ports import run_on_ports

NATIVE, RING = "native", "ring"
TIMEOUT = 120.0  # seconds for a message
REPEATS = 97  # values of a buffer: whole numbers, whose sums are exact in any order
DELAY = 0.3e-3  # seconds from a host to another one: two devices, and two processes that wake up
PAYLOAD = (PORT_MTU - 52) / (PORT_MTU + 14)  # of a full packet: without heads of TCP and Ethernet
TURN = 64 << 10  # bytes: what the kernel takes from one TCP connection at a time
Ways = dict[str, Callable[[torch.Tensor], object]]


class Job:
    """A job measures reductions of `ranks`; `rates`: bytes per second by port, empty if unknown."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.ranks, self.goal = options.ranks, Goal(options.collective)
        self.rounds, self.delay = options.rounds, seconds_of(options.delay)
        rules = [r for text in options.host for r in parse_port_rules(text, self.ranks, "--host")]
        first = {rule.host: rule.rate for rule in reversed(rules)}
        self.rates = [first[host] for host in range(self.ranks)] if first else []
        rates = self.rates or [math.inf] * self.ranks
        slowest = min(range(self.ranks), key=lambda rank: (rates[rank], -rank))
        named = options.late_ranks
        self.late_ranks = [int(rank) for rank in named.split(",")] if named else [slowest]
        halves = self.goal is not Goal.ALL_REDUCE
        found = options.algorithms.split(",") if options.algorithms else None
        self.algorithms = found or [*(SHARDED if halves else ALGORITHMS), NATIVE]
        if self.ranks < FEWEST_RANKS["stragglar"] or len(self.late_ranks) != 1:
            self.algorithms = [name for name in self.algorithms if name != "stragglar"]
        self.ports = None
        if self.rates:
            rates = [PAYLOAD * rate for rate in self.rates]
            self.ports = equal_ports(rates, DELAY + self.delay, turn=TURN)

    def plan(self, name: str, nbytes: int) -> CollectivePlan:
        """One for every lateness: late ranks are taken for very late."""
        halves = self.goal is not Goal.ALL_REDUCE
        if self.ports is None:
            if halves:
                return for_shards(self.goal, name, self.ranks, nbytes)
            return for_gradients(name, self.ranks, nbytes, self.late_ranks)
        ports = self.ports
        job = AllReduce(
            self.ranks, nbytes, max(ports.out), ports.delay, MESSAGE, math.inf, ports.turn
        )
        if halves:
            cut = best_shard_pieces(name, job)
            return sharded_plan(self.goal, name, self.ranks, cut)
        return sized(name, job, self.late_ranks)

    def predicted(self, plan: CollectivePlan, nbytes: int, late: float) -> float:
        """Milliseconds by the clock of ports; nan where no rate is known."""
        if self.ports is None:
            return math.nan
        arrivals = [late * (rank in self.late_ranks) for rank in range(self.ranks)]
        return 1e3 * run_on_ports(plan, nbytes, self.ports, arrivals).after_arrival


def seconds_of(text: str) -> float:
    return 0.0 if text == "0" else parse_seconds(text, "a time")


def latest(moment: float) -> float:
    """Return the latest `moment` of all ranks, which share the clock of one machine."""
    each = torch.tensor([moment], dtype=torch.float64)
    dist.all_reduce(each, dist.ReduceOp.MAX)
    return float(each)


def shard(count: int, job: Job) -> slice:
    rank = dist.get_rank()
    return slice(rank * count // job.ranks, (rank + 1) * count // job.ranks)


def native(job: Job, buffer: torch.Tensor) -> None:
    """The all-reduce of torch over gloo, into the `buffer` itself, as Megatron calls it."""
    mine = buffer[shard(len(buffer), job)]
    if job.goal is Goal.ALL_REDUCE:
        dist.all_reduce(buffer)
    elif job.goal is Goal.REDUCE_SCATTER:
        dist.reduce_scatter_tensor(mine, buffer)
    else:
        dist.all_gather_into_tensor(buffer, mine)


def measured(ways: Ways, count: int, late: float, job: Job) -> dict[str, tuple[float, float]]:
    """By way, medians of ms after the last arrival, and of CPU of all ranks together.

    The first round opens connections, and is left out.
    """
    rank, values = dist.get_rank(), torch.arange(count) % REPEATS
    mine = (values + rank).float()
    right = (job.ranks * values + sum(range(job.ranks))).float()
    if job.goal is Goal.ALL_GATHER:
        right = (values + torch.arange(count) // (count // job.ranks)).float()
    checked = shard(count, job) if job.goal is Goal.REDUCE_SCATTER else slice(None)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(job.rounds + 1):
        first = number % len(ways)
        for name in [*ways, *ways][first : first + len(ways)]:
            buffer = mine.clone()
            # gloo takes as many steps to say when, each of which crosses a delay there and back.
            began = latest(time.monotonic() + 1e-3 + 4 * job.ranks * job.delay)
            cpu = time.process_time()
            until = began + late * (rank in job.late_ranks)
            time.sleep(max(0.0, until - time.monotonic()))
            ways[name](buffer)
            own = torch.tensor([time.process_time() - cpu], dtype=torch.float64)
            spent = latest(time.monotonic()) - began - late
            dist.all_reduce(own)
            if not torch.equal(buffer[checked], right[checked]):
                raise SystemExit(f"{name} of {4 * count} bytes gave wrong numbers")
            if number:
                found[name].append((1e3 * spent, 1e3 * float(own)))
    return {name: tuple(map(median, zip(*costs, strict=True))) for name, costs in found.items()}


def tables(job: Job, options: argparse.Namespace) -> list[Table]:
    """One for each size and lateness; a collective of all ranks."""
    found = []
    with contextlib.ExitStack() as opened:
        exchanges = {}
        for name in job.algorithms:
            if name != NATIVE:
                # Its own, as in a training: how much TCP sends at once depends on what a
                # connection has carried before.
                connected = Connected.between(dist.group.WORLD, f"late {name}", TIMEOUT, "engine")
                opened.callback(connected.close)
                exchanges[name] = connected.exchange
        for nbytes in (round(parse_bytes(text, "--sizes")) for text in options.sizes.split(",")):
            plans = {name: job.plan(name, nbytes) for name in exchanges}
            ways: Ways = {n: partial(exchanges[n].run, plan=plan) for n, plan in plans.items()}
            if NATIVE in job.algorithms:
                ways[NATIVE] = partial(native, job)
            buffer = nbytes / max(job.rates) if job.rates else 0.02
            lateness = [seconds_of(text) for text in options.late.split(",") if text]
            for late in lateness or (0.0, buffer):
                costs = measured(ways, nbytes // 4, late, job)
                found.append(table(job, nbytes, late, plans, costs))
        dist.barrier()  # nobody hangs up before all have what they wait for
    return found


def table(
    job: Job,
    nbytes: int,
    late: float,
    plans: dict[str, CollectivePlan],
    costs: dict[str, tuple[float, float]],
) -> Table:
    rows = []
    for name, (ms, cpu) in costs.items():
        plan = plans.get(name)
        cells = [name, str(plan.pieces) if plan else "", f"{ms:.3g}"]
        cells.append(f"{job.predicted(plan, nbytes, late):.3g}" if plan and job.ports else "")
        cells += [f"{costs[way][0] / ms:.2f}" if way in costs else "" for way in (RING, NATIVE)]
        rows.append([*cells, f"{cpu:.0f}"])
    who = ",".join(map(str, job.late_ranks))
    title = f"{job.goal.value} of {nbytes / 1e6:g} MB, {job.ranks} ranks, {who} late by"
    columns = ("", "pieces", "ms", "predicted", "over ring", "over native", "CPU, ms")
    return Table(f"{title} {1e3 * late:g} ms", columns, rows)


def start(options: argparse.Namespace) -> int:
    """Run this script on all ranks, each a host of its own with --host; the exit status."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(options.ranks)]
    if options.host:
        command = [sys.executable, "-m", "megatron_adaptra", "netlab", "run", "--no-measure"]
        command += ["--hosts", str(options.ranks)]
        command += [word for rule in options.host for word in ("--host", rule)]
        command += [] if options.delay == "0" else ["--delay", options.delay]
        command += ["--", sys.executable]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.run([*command, *sys.argv], check=False, env=environment).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--ranks", type=int, default=8)
    add("--sizes", default="3200kB", metavar="SIZE,...", help="of the buffer")
    add("--late", default="", metavar="TIME,...",
        help="what late ranks come after the others (default: 0 and the time of one buffer "
        "through a port; 20 ms on this machine)")  # fmt: skip
    add("--late-ranks", metavar="RANK,...", help="default: the one whose port is slowest")
    add("--host", action="append", default=[], metavar="RULE", help="such as all:20MB/s")
    add("--delay", default="0", metavar="TIME", help="beside --host, from each to each other one")
    add("--collective", default=Goal.ALL_REDUCE.value, choices=[goal.value for goal in Goal])
    add("--algorithms", metavar="NAME,...", help="default: all")
    add("--rounds", type=int, default=7, help="turns whose median is shown")
    add("--markdown", action="store_true", help="print tables in Markdown")
    options = parser.parse_args()
    job = Job(options)
    if "RANK" not in os.environ:
        return start(options)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = tables(job, options)
    if dist.get_rank() == 0:
        for each in found:
            print(markdown(each)) if options.markdown else show_table(each)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
