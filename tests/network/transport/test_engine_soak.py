"""Very many messages over one pair of endpoints: all are right, and memory stays as it is."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

SCRIPT = Path(__file__).parents[3] / "benchmarks/engine_soak.py"
MB = 6  # that a peak may add late


@pytest.mark.large
@pytest.mark.parametrize(("kind", "count"), [("tcp", 1_000_000), ("shm", 10_000)])
def test_contents_are_right_and_memory_is_flat(kind: str, count: int) -> None:
    words = ["--kind", kind, "--messages", count, "--seed", random.randrange(2**32)]
    print(*words)
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    patience = PATIENCE + count / 500
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience, check=False)
    assert done.returncode == 0, done.stderr
    for row in map(json.loads, done.stdout.splitlines()):
        assert (row["messages"], row["wrong"], row["kept"]) == (count, 0, 0)
        for what in ("memory MB", "arena MB"):
            notes = row[what]
            assert notes[-1] < notes[len(notes) // 2] + MB, notes
