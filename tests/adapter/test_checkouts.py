"""Megatron-LM checkouts train the same with the plugin, and faster over a slow link.

ADAPTRA_MEGATRON_LM names their folders, separated by colons; scripts/test_megatron_lm.sh tries more
shapes, and makes the environments for all releases.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import in_time

MATRIX = Path(__file__).resolve().parents[2] / "scripts" / "megatron_lm_matrix.py"
NAME = "ADAPTRA_MEGATRON_LM"
CHECKOUTS = [folder for folder in os.environ.get(NAME, "").split(":") if folder]
pytestmark = [pytest.mark.trains, pytest.mark.timing, pytest.mark.timeout(1200)]


@pytest.mark.skipif(not CHECKOUTS, reason=f"{NAME} names no Megatron-LM checkouts (FOLDER:FOLDER)")
@pytest.mark.parametrize("checkout", CHECKOUTS or [""], ids=lambda folder: Path(folder).name)
def test_a_checkout_trains_as_stock_and_hides_a_slow_link(checkout: str, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    command = [sys.executable, str(MATRIX), checkout, "--only", "pp2,slow", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100, check=False)
    if "left out" in done.stderr and not out.exists():
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())
    assert [row["run"] for row in results] == ["pp2", "pp4 slow 2-3"]
    assert all(row["losses_identical"] and row["parameters_identical"] for row in results)
    in_time("an adapted iteration, twice, beside stock's", 2, results[1]["ratio"])
