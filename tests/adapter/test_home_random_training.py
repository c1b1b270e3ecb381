"""Dropout by home: any routes give the gradients and losses of the same microbatches at home.

A GPT in double precision, in real processes. Only the order of sums differs.
"""

from __future__ import annotations

import functools
import json
import random
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from ir.strategies import random_schedule
from running import zygote

from megatron_adaptra.adapter.baseline.shape import GPTShape
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan.fixed.baselines import first_schedule

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).with_name("home_random_script.py")
SEED = random.SystemRandom().randrange(2**31)
STAGES, REPLICAS, COUNT = 2, 2, 3
SHAPE = GPTShape(STAGES, microbatches=COUNT, layers=2, hidden=16, heads=2, seq_length=8)
HOME = first_schedule(STAGES, COUNT, 9.0).replicated(REPLICAS)
ROUTED = {
    "whole backwards": (0.0, 0.0), "halves": (1.0, 0.0), "recomputed": (0.0, 1.0),
    "mixed": (0.5, 0.5), "mixed again": (0.5, 0.5),
}  # fmt: skip


def routed() -> dict[str, Schedule]:
    """Random routes in a random order; some microbatch leaves its home at least."""
    rng, found = random.Random(SEED), {}
    for name, (split, again) in ROUTED.items():
        while name not in found or not found[name].routes.moved:
            found[name] = random_schedule(
                rng, STAGES, COUNT, split=split, again=again, replicas=REPLICAS, moved=0.7
            )
    return found


@functools.cache
def trained() -> dict[str, list[dict[str, Any]]]:
    """By case, what every rank has found; all run in the same processes."""
    plans = {"at home": HOME, **routed(), "stock's states": HOME}
    rows = [
        {"name": name, "schedule": plan.text(), "shape": asdict(SHAPE), "forced": name == "at home"}
        for name, plan in plans.items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        cases = Path(folder) / "cases.json"
        cases.write_text(json.dumps(rows))
        words = [str(SCRIPT), str(cases), folder]
        done = zygote(False).run(
            Path(folder), words, ranks=STAGES * REPLICAS, timeout=300, ends=False
        )
    assert done.status == 0, done.text[-6000:]
    found = [json.loads(line[5:]) for line in done.texts[0].splitlines() if line[:5] == "CASE "]
    return {row["name"]: row["ranks"] for row in found}


def losses(name: str) -> dict[str, float]:
    return {what: loss for rank in trained()[name] for what, loss in rank["losses"].items()}


@pytest.mark.parametrize("name", ROUTED)
def test_any_routes_drop_what_would_be_dropped_at_home(name: str) -> None:
    print(f"seed {SEED}")
    wanted, found = losses("at home"), losses(name)
    assert len(wanted) == 2 * REPLICAS * COUNT
    assert found == pytest.approx(wanted, rel=1e-12)
    for rank in trained()[name]:
        assert rank["types"] == "torch.float64"
        assert rank["error"] < 1e-12
        assert rank["limits"] == {}


def test_the_comparison_sees_other_masks() -> None:
    """Those of stock, which are drawn in the order of ops."""
    by_home, stock = losses("at home"), losses("stock's states")
    assert by_home.keys() == stock.keys()
    assert all(by_home[what] != stock[what] for what in stock)
    assert min(rank["error"] for rank in trained()["stock's states"]) > 1e-6


@pytest.mark.parametrize("name", ["at home", *ROUTED, "stock's states"])
def test_a_rank_s_own_generators_are_as_they_were(name: str) -> None:
    """To the last bit, after each iteration; where stock's states are drawn from they go on."""
    assert {kept for rank in trained()[name] for kept in rank["kept"]} == {name != "stock's states"}
