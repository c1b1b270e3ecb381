"""Part `nccl`: real NCCL between ranks that share a GPU, over links that can be slow.

First what is there, then a smoke test of each way to connect (shared_nccl.WAYS) until one works,
then trainings of stock and ours whose link is slow for a while. Figures are written as they come.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from fakes.slow_net.network import NAME, SlowNetwork
from gpu_check.hide import compared
from gpu_check.ranks import Deadline, Failed, run_ranks
from gpu_check.result import Result, many, ms
from gpu_check.shared_nccl import MPS_CONTROL, WAYS, Network, Way, host_of, served, why_not
from gpu_check.target import CPU, FAKE, GPU, Target
from gpu_check.trainings import (
    DP2,
    GRAPHS_ON_GPUS,
    PP2,
    STAGES,
    Shape,
    Trained,
    same_bits,
    train,
)
from gpu_check.trainings import why_not as no_trainings

SIZES, SMALL = (8, 4 << 10, 1 << 20, 16 << 20, 64 << 20), (8, 4 << 10, 1 << 20)  # bytes
SMOKE = 60.0  # seconds of one way's
LEFT = 90.0  # seconds that another pair of trainings takes at least, on a GPU
INFERRED = 0.25  # of a link's delay, by which ours may be off


class Case(NamedTuple):
    """A case is a pair of trainings, of stock and ours, over links that NCCL's messages take."""

    name: str
    shape: Shape
    credit_first: bool = False
    graphs: bool = False


CASES = (
    Case("PP 2, eager", PP2),
    Case("PP 2, credit first", PP2, credit_first=True),
    Case("PP 2 x DP 2, eager", DP2),
    Case("PP 4, CUDA graphs, eager", PP2, graphs=True),
)


def run(found: Result, target: Target, work: Path, deadline: Deadline, options: Any) -> None:
    if target.kind == CPU:
        found.why_not = "torch has no CUDA build here, and so no NCCL"
        return
    if target.kind == FAKE:  # as on the machine that it is for
        target = replace(target, gpus=1)
    _probe(found, target)
    way = next(filter(None, (_smoke(found, target, way, work, deadline) for way in WAYS)), None)
    found.check(way is not None, "no way connects ranks that share a GPU")
    if way is None or not way.slow:
        found.left_out.append("trainings over a slow link: see hide, whose messages go by gloo")
        return
    if why := no_trainings(target):
        found.left_out.append(f"trainings: {why}")
        return
    with served(way) as mps:
        for case in CASES:
            if target.kind == GPU and deadline.left < LEFT:
                found.left_out.append(f"{case.name}: {deadline.left:.0f} s are left")
                continue
            try:
                _trainings(found, target, work, deadline, options, way, mps, case)
            except Failed as error:  # others may do better
                found.wrong.append(str(error))
                print(error.log, file=sys.stderr, flush=True)
            found.so_far()


def _probe(found: Result, target: Target) -> None:
    """Say what is there, in a few seconds."""
    namespaces = subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False)
    there = {
        "/dev/net/tun": Path("/dev/net/tun").exists(),
        "network namespaces": namespaces.returncode == 0,
        MPS_CONTROL: shutil.which(MPS_CONTROL) is not None,
        "nvcc": shutil.which("nvcc") is not None,
    }
    words = ", ".join(f"{name} {'there' if yes else 'missing'}" for name, yes in there.items())
    nccl = target.versions["nccl"] or "unknown"
    found.figures.append(f"NCCL {nccl}, kernel {platform.release()}; {words}")
    found.so_far()


def _smoke(found: Result, target: Target, way: Way, work: Path, deadline: Deadline) -> Way | None:
    """Return the way if it connects two ranks, and say so; else note why it does not."""
    if why := why_not(way, target.versions["nccl"] or "0"):
        found.left_out.append(f"{way.name}: {why}")
        return None
    spins = target.kind == GPU
    network = Network.of(way, work / f"smoke-{WAYS.index(way)}", 2)
    one_gpu = replace(target, gpus=1)
    try:
        with served(way) as mps, _variables({**network.variables, **mps}):
            ranks = run_ranks(
                one_gpu, "nccl_smoke", work, Deadline(min(SMOKE, deadline.left)), ranks=2,
                options={"sizes": SIZES if spins else SMALL, "spins": spins},
            )  # fmt: skip
    except (Failed, OSError, subprocess.SubprocessError) as error:
        found.left_out.append(f"{way.name}: {error}")
        found.so_far()
        return None
    networks = sorted({one for rank in ranks for one in rank["networks"]})
    wrong = sum(message["wrong"] for rank in ranks for message in rank["messages"])
    found.check(wrong == 0, f"{way.name}: {many(wrong, 'message')} with other bytes")
    found.check(all(rank["sum"] for rank in ranks), f"{way.name}: an all-reduce with another sum")
    if way.slow:
        found.check(any(NAME in one for one in networks), f"{way.name}: NCCL took {networks}")
        found.check(bool(SlowNetwork(network.folder).passed()), f"{way.name}: nothing has passed")
    took = ", ".join(f"{m['bytes']} B {ms(m['seconds'])}" for m in ranks[0]["messages"])
    beside = f"; compute beside a kernel that waits {ranks[0]['beside']:.2f} x" if spins else ""
    joined = ms(ranks[0]["joined"])
    found.figures.append(f"two ranks on one GPU, {way.name} ({', '.join(networks)}): joined in "
                         f"{joined}, both ways {took}{beside}")  # fmt: skip
    found.so_far()
    return way


@contextmanager
def _variables(given: Mapping[str, str]) -> Iterator[None]:
    """Have processes that start meanwhile inherit these variables."""
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _trainings(
    found: Result, target: Target, work: Path, deadline: Deadline, options: Any, way: Way,
    mps: Mapping[str, str], case: Case,
) -> None:  # fmt: skip
    """Train stock and ours over a network whose link is slow for a while, and compare."""
    what, plant = f"over NCCL, {case.name}", "fixed" if options.plant else ""
    stages = GRAPHS_ON_GPUS.stages if case.graphs else STAGES
    folder = work / f"network-{CASES.index(case)}"
    network = Network.of(way, folder, stages * case.shape.replicas, case.credit_first)
    with _variables({**network.variables, **mps}):
        stock, ours = (
            train(target, work, deadline, options, plugin, plant if plugin else "", case.graphs,
                  case.shape, network)
            for plugin in (False, True)
        )  # fmt: skip
    if target.kind == GPU:
        same_bits(found, what, stock, ours)
    others = [i for i in range(1, ours.plan.begin) if stock.calls[i] != ours.calls[i]]
    found.check(not others, f"{what}: healthy iteration {others[:1]} makes other calls than stock")
    if case.graphs:  # whose warmup stays: with ranks that share a GPU no plan may gain enough
        over = f"{sum(ours.ours)} of {len(ours.ms)} iterations over the engine"
        found.figures.append(f"{what}: {over}")
        return
    found.figures.append(f"{what}: {compared(found, stock, ours, options, strict=False)}")
    _delays(found, what, ours, network, options.delay / 1e3, case.shape.links(stages))


def _delays(
    found: Result, what: str, ours: Trained, network: Network, delay: float,
    links: Sequence[tuple[int, int]],
) -> None:  # fmt: skip
    """Compare the delay that ours inferred from NCCL's messages with the network's own log."""
    slow = [{host_of(a), host_of(b)} for a, b in links]
    passed = SlowNetwork(network.folder).passed()
    late = [
        (one.arrived - one.sent) / 1e9
        for one in passed
        if {one.source, one.target} in slow and one.arrived - one.sent > 1e9 * delay / 2
    ]
    inferred = [
        link["delay_ms"] / 1e3
        for decision in ours.decisions
        if ours.plan.begin <= decision.get("iteration", -1) < ours.plan.end
        for link in decision.get("links", [])
        if link["delay_ms"] > link["delay_before_ms"]
    ]
    if not inferred or not late:
        found.wrong.append(f"{what}: {many(len(late), 'late message')}, no delay was inferred")
        return
    true, ours_is = median(late), median(inferred)
    off = abs(ours_is - true) / true
    found.check(off <= INFERRED, f"{what}: {ms(ours_is)} were inferred, {ms(true)} are true")
    found.figures.append(f"the link took {ms(true)} by the network's log, {ms(ours_is)} inferred")
