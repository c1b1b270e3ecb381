"""Dropout by home: any routes give the gradients and losses of the same microbatches at home.

A GPT in double precision, in real processes. Only the order of sums differs.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from ir.strategies import random_schedule
from running import zygote
from seeding import new_seed

from megatron_adaptra.adapter.baseline.shape import GPTShape
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan.pipeline.fixed import first_schedule

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).parent / "ranks" / "home_random_script.py"
STAGES, REPLICAS, COUNT = 2, 2, 3
SHAPE = GPTShape(STAGES, microbatches=COUNT, layers=2, hidden=16, heads=2, seq_length=8)
HOME = first_schedule(STAGES, COUNT, 9.0).replicated(REPLICAS)
ROUTED = {
    "whole backwards": (0.0, 0.0), "halves": (1.0, 0.0), "recomputed": (0.0, 1.0),
    "mixed": (0.5, 0.5),
}  # fmt: skip


def routed() -> dict[str, Schedule]:
    """Random routes in a random order; some microbatch leaves its home at least."""
    rng, found = random.Random(new_seed()), {}
    for name, (split, again) in ROUTED.items():
        while name not in found or not found[name].routes.moved:
            found[name] = random_schedule(
                rng, STAGES, COUNT, split=split, again=again, replicas=REPLICAS, moved=0.7
            )
    return found


def trained(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """By case, what every rank has found; all run in the same processes."""
    plans = {"at home": HOME, **routed(), "stock's states": HOME}
    rows = [
        {"name": name, "schedule": plan.text(), "shape": asdict(SHAPE), "forced": name == "at home"}
        for name, plan in plans.items()
    ]
    cases = folder / "cases.json"
    cases.write_text(json.dumps(rows))
    words = [str(SCRIPT), str(cases), str(folder)]
    done = zygote(False).run(folder, words, ranks=STAGES * REPLICAS, timeout=300, ends=False)
    assert done.status == 0, done.text[-6000:]
    found = [json.loads(line[5:]) for line in done.texts[0].splitlines() if line[:5] == "CASE "]
    return {row["name"]: row["ranks"] for row in found}


def losses(ranks: list[dict[str, Any]]) -> dict[str, float]:
    return {what: loss for rank in ranks for what, loss in rank["losses"].items()}


def test_any_routes_drop_what_would_be_dropped_at_home(tmp_path: Path) -> None:
    """Each rank's own generators are as they were, to the last bit, after each iteration.

    The comparison sees other masks: those of stock, which are drawn in the order of ops.
    """
    found = trained(tmp_path)
    at_home, stock = losses(found["at home"]), losses(found["stock's states"])
    assert len(at_home) == 2 * REPLICAS * COUNT
    for name in ROUTED:
        assert losses(found[name]) == pytest.approx(at_home, rel=1e-12), name
        for rank in found[name]:
            assert rank["types"] == "torch.float64"
            assert rank["error"] < 1e-12, name
            assert rank["limits"] == {}
    assert at_home.keys() == stock.keys()
    assert all(at_home[what] != stock[what] for what in stock)
    assert min(rank["error"] for rank in found["stock's states"]) > 1e-6
    for name, ranks in found.items():
        kept = {kept for rank in ranks for kept in rank["kept"]}
        assert kept == {name != "stock's states"}, name
