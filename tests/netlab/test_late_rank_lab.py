"""benchmarks/late_rank_lab.py: which phase a plan counts in, and what it was expected to save."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from late_rank_lab import apart, cells, figures

PHASES = [(0, 10, -1), (10, 20, 2), (20, 30, 1), (30, 40, -1)]
RANKS = 4


def decision(detected: int, after: str = "direct", gain: float = 0.25) -> dict[str, Any]:
    """That is in force two iterations later; iterations take 800 ms."""
    known = {"iteration": 0.8} if gain else None
    return {
        "detected": detected, "iteration": detected + 2, "after": after, "gain": gain,
        "predicted_ms": 50.0, "native_ms": 150.0, "figures": known,
    }  # fmt: skip


def measured(decisions: list[dict[str, Any]], ours: float = 0.6) -> dict[str, Any]:
    """Iterations take 0.8 s by native, and so long while a plan is in force."""
    plans = {one["iteration"]: one["after"] != "native" for one in decisions}
    seconds, planned = [], False
    for iteration in range(40):
        planned = plans.get(iteration, planned)
        seconds.append(ours if planned else 0.8)
    arms = {"native": [0.8] * 40, "auto": seconds}
    arm = {
        name: {"seconds": [row] * RANKS, "losses": [[2.0] * 40] * RANKS, "digest": ["a"] * RANKS}
        for name, row in arms.items()
    }
    return {**arm, "decisions": decisions}


def test_a_plan_of_the_first_phase_counts_in_all() -> None:
    rows = figures(measured([decision(4)]), PHASES)
    assert [row["late"] for row in rows] == [-1, 2, 1, -1]
    assert [row["decisions"] for row in rows] == [1, 0, 0, 0]
    assert (rows[0]["found"], rows[0]["in force"]) == (5, 6)
    assert rows[0]["before"] == pytest.approx(800)
    for row in rows:
        assert row["native"] - row["ours"] == pytest.approx(200)
        # A quarter of 800 ms: more than the reduce-scatter alone saves, 100 ms.
        assert row["predicted gain"] == pytest.approx(200)
    assert cells("a", rows[0])[5:] == ["200 (25.0%)", "200 (25.0%)", "1.00", "5", "6"]
    assert cells("a", rows[1])[3:] == [
        "",
        "600",
        "200 (25.0%)",
        "200 (25.0%)",
        "1.00",
        "before",
        "",
    ]


def test_a_plan_counts_from_when_it_is_in_force() -> None:
    """One that is found at the end of a phase does nothing in it; native again is no plan."""
    done = measured([decision(18), decision(33, "native", gain=0.0)])
    rows = figures(done, PHASES)
    assert cells("a", rows[0])[3:] == ["no plan", *[""] * 6]
    assert rows[1]["ours"] is None
    assert cells("a", rows[1])[4] == "too late"
    assert rows[2]["ours"] == pytest.approx(600)
    assert rows[3]["ours"] == pytest.approx(800)
    assert cells("a", rows[3])[5:8] == ["0", "0", ""]
    rows = figures(measured([decision(9)]), PHASES)
    assert rows[0]["ours"] is None
    assert rows[1]["ours"] == pytest.approx(600)


@pytest.mark.parametrize("at", [5, 6, 7])
def test_losses_are_natives_until_a_plan_has_reduced_gradients(at: int) -> None:
    done = measured([decision(4)])
    assert "to the last bit" in apart(done)
    done["auto"]["losses"] = [[2.0] * at + [2.1] * (40 - at)] * RANKS
    text = apart(done)
    assert f"first in iteration {at}" in text
    assert ("NOT BY A PLAN" in text) == (at <= 6)
    assert "NOT BY A PLAN" in apart({**done, "decisions": []})
