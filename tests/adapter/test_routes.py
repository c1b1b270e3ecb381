"""Replicas that run each other's microbatches train as stock Megatron does.

Whole pipelines that exchange partners keep every bit: where two replicas sum their gradients, it
does not matter which of them has which. Otherwise sums have another order.
"""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from running import zygote

from megatron_adaptra.adapter.baseline.shape import GPTShape
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan.fixed.baselines import first_schedule

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


CASES: dict[str, dict[str, Any]] = {
    "at home, executor": {"schedule": first_schedule(2, COUNT, 9.0).replicated(2)},
    "last stage swapped, executor": {"schedule": swapped(1)},
    "first stage swapped, native": {"schedule": swapped(0), "engine": "native"},
    "last stage swapped, native, gloo": {
        "schedule": swapped(1), "engine": "native", "transport": "gloo",
    },
}  # fmt: skip


@functools.cache
def trained() -> dict[str, list[dict[str, Any]]]:
    """By case, what every rank ended with; all run in the same processes."""
    defaults = {"engine": "executor", "transport": "auto", "shape": asdict(SHAPE)}
    rows = [
        {**defaults, **case, "name": name, "schedule": case["schedule"].text()}
        for name, case in CASES.items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        cases = Path(folder) / "cases.json"
        cases.write_text(json.dumps(rows))
        done = zygote(False).run(
            Path(folder), [str(SCRIPT), str(cases), folder], ranks=STAGES * REPLICAS, timeout=600
        )
    found = [json.loads(line[5:]) for line in done.texts[0].splitlines() if line[:5] == "CASE "]
    by_name = {row["name"]: row["ranks"] for row in found}
    if done.status:
        by_name["error"] = [{"error": done.text[-6000:]}]
    return by_name


@pytest.mark.parametrize("name", CASES)
def test_whole_swaps_keep_every_bit(name: str) -> None:
    ranks = trained().get(name)
    assert ranks is not None, trained()["error"][0]["error"]
    for rank in ranks:
        assert set(rank["ours"]["ran"]) == {rank["ours"]["planned"]}
        for what in ("norms", "parameters", "random"):
            assert rank["ours"][what] == rank["stock"][what], what
    # A home's losses stand where its last stage ran.
    last = {tuple(rank["place"]): rank for rank in ranks if rank["place"][1] == STAGES - 1}
    for (replica, stage), rank in last.items():
        home = int(rank["ours"]["planned"].split()[0].partition("@")[2])
        assert rank["ours"]["losses"] == last[home, stage]["stock"]["losses"], replica
        assert rank["stock"]["losses"][0]
