"""Every schedule trains Megatron's models to the same bits as stock Megatron.

ADAPTRA_LAYOUTS: those to run, separated by commas (default: all; see cases.py).
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from cases import LAYOUTS, cases_of
from running import torchrun

HERE = Path(__file__).parent
CHOSEN = [name for name in os.environ.get("ADAPTRA_LAYOUTS", "").split(",") if name] or list(
    LAYOUTS
)
CASES = [(layout, case) for layout in CHOSEN for case in cases_of(layout)]


@functools.cache
def trained(layout: str) -> dict[str, list[dict[str, Any]]]:
    """By case, what every rank ended with; all cases of a layout run in the same processes."""
    with tempfile.TemporaryDirectory() as folder:
        cases = Path(folder) / "cases.json"
        cases.write_text(json.dumps([case.dump() for case in cases_of(layout)]))
        ranks, _ = LAYOUTS[layout]
        done = torchrun(HERE / "schedules_script.py", ranks, str(cases), folder, timeout=900)
    rows = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("CASE ")]
    found = {row[0]["name"]: row for row in rows}
    if done.returncode:
        found["error"] = [{"error": done.stderr[-4000:]}]
    return found


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("layout", "case"), CASES, ids=[case.name for _, case in CASES])
def test_same_bits_as_stock_and_the_predicted_memory(layout: str, case: Any) -> None:
    ranks = trained(layout).get(case.name)
    assert ranks is not None, trained(layout)["error"]
    if case.engine != "stock":
        kinds = {kind for rank in ranks for ran in rank["ours"]["ran"] for kind in ran}
        halves = case.policy.startswith("zb") or "adaptive" in case.name
        assert {"F", "I", "W"} <= kinds if halves else {"F", "B"} <= kinds
        assert halves or {"I", "W"}.isdisjoint(kinds)
        assert ("R" in kinds) is case.recompute
    for rank in ranks:
        for what in ("losses", "steps", "parameters", "random", "statistics"):
            assert rank["ours"][what] == rank["stock"][what], what
        for peak in rank["ours"]["peaks"] if case.engine == "executor" else ():
            assert peak == pytest.approx(rank["ours"]["predicted_peak"])
    assert any(rank["stock"]["losses"] for rank in ranks)


def test_sequence_parallel_layers_in_halves() -> None:
    done = torchrun(HERE / "sequence_parallel_script.py", 2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("good") == 2


def test_what_a_forward_does_besides_happens_once() -> None:
    done = torchrun(HERE / "replay_script.py", 1)
    assert "REPLAYED" in done.stdout, done.stderr[-3000:]
