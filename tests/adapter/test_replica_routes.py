"""Replicas that run each other's microbatches train as stock Megatron does.

Whole pipelines that exchange partners keep every bit: where two replicas sum their gradients, it
does not matter which of them has which. Otherwise sums have another order.
"""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import asdict, replace
from math import fsum
from pathlib import Path
from typing import Any

import pytest
from running import zygote

from megatron_adaptra.adapter.baseline.shape import GPTShape
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan.fixed.baselines import first_schedule
from megatron_adaptra.plan.reroute import plan_replicas

SCRIPT = Path(__file__).with_name("routes_script.py")
STAGES, REPLICAS, COUNT = 2, 2, 4
SHAPE = GPTShape(STAGES, microbatches=COUNT, layers=2, hidden=32, seq_length=16)


def swapped(stage: int) -> Schedule:
    """The two replicas exchange their workers of a stage, for all microbatches."""
    start = first_schedule(STAGES, COUNT, float("inf")).replicated(REPLICAS)
    lines = list(start.order)
    one, other = stage, STAGES + stage
    lines[one], lines[other] = lines[other], lines[one]
    return replace(start, order=tuple(lines), policy="swap", why="partners exchanged")


def slow_worker(moves: str, replicas: int = REPLICAS) -> Schedule:
    """What is planned where worker 1.1 takes four times as long: some of its work moves."""
    even = (0.01,) * STAGES
    pipeline = Conditions(COUNT, even, even, (0.0,) * STAGES)
    plan = plan_replicas(ReplicaConditions(pipeline, replicas, slow={3: 4.0}))
    (found,) = [move.schedule for move in plan.moves if move.name == moves]
    return found


def idle_worker() -> Schedule:
    """Worker 1.1 runs nothing at all."""
    even = (0.01,) * STAGES
    pipeline = Conditions(COUNT, even, even, (0.0,) * STAGES)
    return plan_replicas(ReplicaConditions(pipeline, REPLICAS, frozenset({3}))).schedule


PLAIN = replace(SHAPE, dropout=0.0)  # random states are those of the order of microbatches
MOVED = {
    "shifted": {"schedule": slow_worker("shift")},
    "re-routed": {"schedule": slow_worker("re-route")},
    "an idle worker": {"schedule": idle_worker()},
    "re-routed, overlapped reduction": {
        "schedule": slow_worker("re-route"),
        "shape": replace(PLAIN, overlap_reduce=True),
    },
    "an idle worker, distributed optimizer": {
        "schedule": idle_worker(),
        "shape": replace(PLAIN, distributed_optimizer=True),
    },
    "an idle worker, overlapped reduction": {
        "schedule": idle_worker(),
        "shape": replace(PLAIN, overlap_reduce=True),
    },
}
CASES: dict[str, dict[str, Any]] = {
    "at home, executor": {"schedule": first_schedule(2, COUNT, 9.0).replicated(2)},
    "last stage swapped, executor": {"schedule": swapped(1)},
    "first stage swapped, native": {"schedule": swapped(0), "engine": "native"},
    "last stage swapped, native, gloo": {
        "schedule": swapped(1), "engine": "native", "transport": "gloo",
    },
}  # fmt: skip


def run(
    cases: dict[str, dict[str, Any]], ranks: int, **defaults: Any
) -> dict[str, list[dict[str, Any]]]:
    """By case, what every rank ended with; all run in the same processes."""
    rows = []
    defaults = {
        "engine": "executor", "transport": "auto", "iterations": 3, "permuted": [], "shape": PLAIN,
        **defaults,
    }  # fmt: skip
    for name, case in cases.items():
        row = {**defaults, **case, "name": name, "schedule": case["schedule"].text()}
        rows.append({**row, "shape": asdict(row["shape"])})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cases.json"
        file.write_text(json.dumps(rows))
        done = zygote(False).run(
            Path(folder), [str(SCRIPT), str(file), folder], ranks=ranks, timeout=600, ends=False
        )
    found = [json.loads(line[5:]) for line in done.texts[0].splitlines() if line[:5] == "CASE "]
    by_name = {row["name"]: row["ranks"] for row in found}
    if done.status:
        by_name["error"] = [{"error": done.text[-6000:]}]
    return by_name


@functools.cache
def trained() -> dict[str, list[dict[str, Any]]]:
    at_home = {name: {"shape": SHAPE, **case} for name, case in CASES.items()}
    return run({**at_home, **MOVED}, STAGES * REPLICAS)


@pytest.mark.parametrize("name", MOVED)
def test_gradients_of_moved_microbatches_are_those_of_stock(name: str) -> None:
    """But for rounding: their sums have another order."""
    ranks = trained().get(name)
    assert ranks is not None, trained()["error"][0]["error"]
    stock, ours = [], []
    for rank in ranks:
        assert set(rank["ours"]["ran"]) == {rank["ours"]["planned"]}
        stock += rank["stock"]["losses"]
        ours += rank["ours"]["losses"]
        assert rank["ours"]["norms"] == pytest.approx(rank["stock"]["norms"], rel=1e-5)
        assert rank["ours"]["weights"] == pytest.approx(rank["stock"]["weights"], rel=1e-5)
    every = [sorted(loss for row in rows for loss in row) for rows in (stock, ours)]
    assert every[1] == pytest.approx(every[0], rel=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_whole_swaps_keep_every_bit(name: str) -> None:
    ranks = trained().get(name)
    assert ranks is not None, trained()["error"][0]["error"]
    for rank in ranks:
        assert set(rank["ours"]["ran"]) == {rank["ours"]["planned"]}
        for what in ("norms", "parameters", "random"):
            assert rank["ours"][what] == rank["stock"][what], what
    # A home's losses stand where its last stage ran; the first iteration is stock's.
    last = {tuple(rank["place"]): rank for rank in ranks if rank["place"][1] == STAGES - 1}
    for (replica, stage), rank in last.items():
        home = int(rank["ours"]["planned"].split()[0].partition("@")[2])
        theirs = last[home, stage]["stock"]["losses"][1:]
        assert rank["ours"]["losses"] == [rank["stock"]["losses"][0], *theirs], replica
        assert rank["stock"]["losses"][0]


def mean_losses(ranks: list[dict[str, Any]], of: Any) -> list[float]:
    """Of each iteration, over all microbatches of all replicas, in double precision."""
    rows = [of(rank)["losses"] for rank in ranks if of(rank)["losses"][0]]
    iterations = ([loss for row in each for loss in row] for each in zip(*rows, strict=True))
    return [fsum(losses) / len(losses) for losses in iterations]


def apart(one: list[float], other: list[float]) -> float:
    """The largest relative difference of an iteration's losses."""
    return max(abs(a - b) / a for a, b in zip(one, other, strict=True))


@pytest.mark.long
def test_fifty_iterations_differ_no_more_than_stock_with_other_replicas() -> None:
    """In single precision stock Megatron, too, depends on which replica has which data."""
    moves = {name: {"schedule": slow_worker(name, 3)} for name in ("shift", "re-route")}
    permuted = [[1, 2, 0], [2, 0, 1], [1, 0, 2]]
    found = run(moves, 3 * STAGES, iterations=50, permuted=permuted)
    for name in moves:
        ranks = found.get(name)
        assert ranks is not None, found["error"][0]["error"]
        stock = mean_losses(ranks, lambda rank: rank["stock"])
        assert len(stock) == 50
        ours = apart(stock, mean_losses(ranks, lambda rank: rank["ours"]))
        others = [
            apart(stock, mean_losses(ranks, lambda rank, i=i: rank["permuted"][i]))
            for i in range(len(permuted))
        ]
        assert 0 < ours <= 2 * max(others), (name, others)
